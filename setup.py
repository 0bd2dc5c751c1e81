from setuptools import find_packages, setup

setup(
    name="torchgspmd",
    version="0.1.0",
    description="GSPMD for PyTorch: one annotated model, sharded over a mesh of devices",
    packages=find_packages(include=["torchgspmd", "torchgspmd.*"]),
    entry_points={"console_scripts": ["torchgspmd=torchgspmd.__main__:main"]},
    package_data={"torchgspmd": ["py.typed"], "torchgspmd.tools.report": ["page.html"]},
    license="BSD-3-Clause",
    python_requires=">=3.10",
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    keywords="torch 2.9, torch 2.13, torch 2.15",  # on which the tests pass
    install_requires=["torch>=2.9", "numpy"],
    extras_require={
        "transformers": ["transformers>=5", "torchvision", "torchaudio"],
        "integrations": [
            "transformers>=5",
            "accelerate>=1.15",
            "lightning>=2.6",
            "peft>=0.21",
            "trl>=1.16",
        ],
        "dev": ["ruff==0.17.*", "pyright[nodejs]==1.1.414"],
        # pytest 9.2 ignores the groups of pytest-xdist 3.8, which keep ranks together.
        "test": [
            "pytest<9.2",
            "pytest-xdist",
            "hypothesis",
            "expecttest",
            "safetensors",
            "scikit-learn",
            "highspy",
            "torchmetrics",
        ],
        "examples": ["rich", "matplotlib"],
        "auto": ["highspy"],
        "xla": ["torch==2.9.*", "torch_xla==2.9.*"],
        "tpu": ["torch==2.9.*", "torch_xla[tpu]==2.9.*"],
    },
)
