"""List the packages for setuptools: the folder `build/` becomes `llmops.build`.

All other settings of the distribution are in pyproject.toml.
"""

from setuptools import find_packages, setup

FOLDERS = ("build", "store", "model_repository", "gateway", "control", "cli", "perf")
# Packages that the wheel leaves out: the benchmarks of the project itself.
LAB = ("lab", "lab.*")

setup(
    # The entry point is outside the package, so that it works when another distribution has
    # overwritten the package.
    py_modules=["llmops_triton"],
    packages=[
        "llmops",
        *(f"llmops.{name}" for name in find_packages("llmops")),
        *(
            f"llmops.{name}"
            for folder in FOLDERS
            for name in (folder, *(f"{folder}.{inner}" for inner in find_packages(folder, exclude=LAB)))
        ),
    ],
    package_dir={"llmops": "llmops", **{f"llmops.{folder}": folder for folder in FOLDERS}},
)
