"""What pyproject.toml cannot say: the folder ``checkpoints/`` is packed as ``jaxspec/checkpoints``."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["jaxspec*", "pallas_kernels*"]), "jaxspec.checkpoints"],
    package_dir={"jaxspec.checkpoints": "checkpoints"},
    package_data={"jaxspec.checkpoints": ["*.json", "*/**/*"]},
)
