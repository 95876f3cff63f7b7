"""One drafter per algorithm, all behind the contract of `jaxspec.drafters.base`."""
