"""Packaging of offload-engine. Settings of the tools are in pyproject.toml, tested versions in constraints-*.txt."""

from __future__ import annotations

from setuptools import find_packages, setup

setup(
    name="offload-engine",
    version="0.1.0",
    description="Moves saved activations to host memory between forward and backward, under every pipeline schedule",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["offload_engine*", "megatron_patches*"]),
    package_data={"offload_engine": ["py.typed"]},
    python_requires=">=3.11",
    install_requires=["torch>=2.6"],
    extras_require={
        # What `megatron_patches` patches, and what the trainer in examples/ imports besides.
        "megatron": ["megatron-core>=0.16.1,<0.20", "numpy", "psutil", "tqdm"],
        # Optional base class of ChunkOffloadHandler; the framework half is compiled at install time on most machines.
        "te": ["transformer-engine[pytorch]>=2.4"],
        # FSDP2 (`fully_shard`) is public since this release of torch.
        "fsdp": ["torch>=2.6"],
        # What the front-ends in offload_engine/frontends/integrations attach to; none of them is imported by the rest.
        "integrations": ["transformers>=4.50", "accelerate>=1.3", "lightning>=2.4", "tqdm"],
        "plots": ["matplotlib", "rich"],
        "test": ["hypothesis", "numpy", "psutil", "pytest", "pytest-timeout", "pytest-xdist", "rich", "tqdm"],
        "dev": ["mypy", "pre-commit", "ruff"],
    },
)
