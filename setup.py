"""The packages, found: `build/` imports as `llmops.build`. All else is in pyproject.toml."""

from setuptools import find_packages, setup

FOLDERS = ("build", "store", "model_repository", "gateway", "control", "cli", "perf")
# what the project measures itself with is for its repository
LAB = ("lab", "lab.*")

setup(
    # the entry point, which must work when another distribution has overwritten the package
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
