import pytest

from jaxspec.engine.pages import OutOfPages, PagePool, pages_for


def classes(pool):
    return pool.free, pool.owned, pool.shared, pool.cached


def test_pages_for_rounds_up():
    assert [pages_for(slots, 4) for slots in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_a_page_passes_through_its_classes():
    pool = PagePool(4)
    pages = pool.take(3)
    assert pages == [1, 2, 3] and classes(pool) == (1, 3, 0, 0)
    pool.keep(1)
    pool.keep(2)
    assert classes(pool) == (1, 1, 2, 0)
    assert pool.release(pages) == [1, 2] and classes(pool) == (2, 0, 0, 2)
    pool.hold([1])
    pool.hold([1])
    assert classes(pool) == (2, 0, 1, 1) and pool.holders(1) == 2 and pool.is_cached(2)
    pool.drop(2)
    assert classes(pool) == (3, 0, 1, 0)
    assert pool.release([1]) == [] and pool.release([1]) == [1]
    pool.drop(1)
    pool.check([], [])
    assert classes(pool) == (4, 0, 0, 0)


def test_scratch_is_in_no_grant():
    assert 0 not in PagePool(7).take(7)


def test_too_many_pages_are_refused_and_nothing_is_granted():
    pool = PagePool(2)
    with pytest.raises(OutOfPages, match="3 pages wanted, 2 of 2 are free"):
        pool.take(3)
    assert pool.take(0) == [] and pool.free == 2


def test_wrong_use_is_an_error():
    pool = PagePool(2)
    with pytest.raises(ValueError, match="held by no row"):
        pool.release([1])
    with pytest.raises(ValueError, match="not in the prefix cache"):
        pool.hold([1])
    with pytest.raises(ValueError, match="not in the prefix cache"):
        pool.drop(1)
    with pytest.raises(ValueError, match="must be held by a row"):
        pool.keep(1)
    with pytest.raises(ValueError, match="total=0"):
        PagePool(0)


@pytest.mark.parametrize(
    "tables, cache, complaint",
    [
        ([[1, 1]], [], "twice"),
        ([[1]], [], "references of rows"),
        ([[1, 2]], [3], "references of the prefix cache"),
        ([[1, 2]], [1, 1], "two nodes"),
    ],
)
def test_check_compares_the_books(tables, cache, complaint):
    pool = PagePool(4)
    pool.take(2)
    pool.check([[1, 2]], [])
    with pytest.raises(AssertionError, match=complaint):
        pool.check(tables, cache)
