"""Package definition.

The lower bounds are the oldest versions that the tests pass with (tests/versions.sh runs them).
constraints.txt has the versions that the tests run with otherwise; training_scripts/setup_venv.sh
installs those. torch has an upper bound too, the newest minor version that the tests ran with;
before 2.8 it refuses memory pools for CUDA graphs beside expandable segments. DeepSpeed before
0.19.8 cannot skip an update at ZeRO stage 2. bitsandbytes starts at the version that transformers
asks for: it needs a GPU, and the tests run without. FastAPI starts at its last version for Python
3.10. huggingface_hub brings httpx2; its earlier versions bring httpx. Libraries without a bound are
imported by the package and required, with bounds, by those above them.
"""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

setup(
    name="dschat_ppo",
    version="0.1.0",
    description="RLHF training (SFT, reward model, PPO) in one deepspeed launch",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    author="dschat_ppo developers",
    keywords="RLHF PPO GRPO DPO SFT reward-model DeepSpeed ZeRO language-model",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    entry_points={
        "console_scripts": [
            f"dschat-{name} = dschat_ppo.__main__:installed"
            for name in (
                "sft reward dpo ppo algorithm chat data env evaluate explain export plan replay"
                " report serve-reward"
            ).split()
        ]
    },
    packages=find_packages(include=["dschat_ppo", "dschat_ppo.*"]),
    package_data={
        "dschat_ppo": [
            "py.typed",
            "html_report/assets/*",
            "features/explain/assets/*",
            "cpu_kernels/*.cpp",
            "cpu_kernels/*.h",
            "data/named_templates/*.jinja",
        ]
    },
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.8.0,<2.14",
        "deepspeed>=0.19.8,<0.20",
        "transformers>=5.20.2,<6",
        "accelerate>=1.10.0,<2",
        "datasets>=5.0.0,<6",
        "tensorboard>=2.18.0,<3",
        # required by the libraries above
        "filelock",
        "huggingface-hub",
        "jinja2",
        "numpy",
        "psutil",
        "pyarrow",
        "PyYAML",
        "safetensors",
        "tokenizers",
        "tqdm",
    ],
    extras_require={
        "serve": ["fastapi>=0.162.5,<1", "uvicorn>=0.54.0,<1"],
        "agents": ["fastapi>=0.162.5,<1", "uvicorn>=0.54.0,<1", "openai>=2.9,<4"],
        "lora": ["peft>=0.20.0,<1"],
        "qlora": ["peft>=0.20.0,<1", "bitsandbytes>=0.46.1"],
        "images": ["pillow", "num2words"],
        "math": ["math-verify"],
        "plot": ["matplotlib"],
        "notebook": ["ipykernel", "jupyterlab", "matplotlib", "nbclient"],
        "docs": [
            "mkdocs>=1.6,<2",
            "mkdocs-material>=9.6,<10",
            "mkdocstrings[python]>=1,<2",
            "mkdocstrings-python>=2,<3",
        ],
        "sentencepiece": ["sentencepiece"],
        "wandb": ["wandb>=0.30.0,<1"],
        "trackio": ["trackio>=0.40.0,<1"],
        "test": [
            "pytest",
            "pytest-xdist",
            "ruff",
            "mypy",
            "types-PyYAML",
            "hypothesis",
            "math-verify",
            "pillow",
            "num2words",
            "peft>=0.20.0,<1",
            # the tests build the documents
            "mkdocs>=1.6,<2",
            "mkdocs-material>=9.6,<10",
            "mkdocstrings[python]>=1,<2",
            "mkdocstrings-python>=2,<3",
            "wandb>=0.30.0,<1",
            "trackio>=0.40.0,<1",
            "fastapi>=0.162.5,<1",
            "uvicorn>=0.54.0,<1",
            "openai>=2.9,<4",
        ],
    },
)
