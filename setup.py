"""Package definition.

deepspeed, transformers, accelerate, datasets, tensorboard and the extras are pinned to the versions that the tests run
with. torch is a range (tested with 2.13.0), because its build must match the GPU driver of the machine. bitsandbytes is
a range from the version that transformers asks for: it needs a GPU, and the tests run without. The other ranges belong
to libraries that the package imports and that the pinned libraries require anyway; the bounds are theirs.
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
    packages=find_packages(include=["dschat_ppo", "dschat_ppo.*"]),
    package_data={"dschat_ppo": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.6",
        "deepspeed==0.19.8",
        "transformers==5.23.0",
        "accelerate==1.15.0",
        "datasets==5.2.0",
        "tensorboard==2.21.0",
        # required by the libraries above
        "filelock>=3.10",
        "huggingface-hub>=1.31.0,<3.0",
        "jinja2>=3.1.0",
        "multiprocess<0.70.20",
        "numpy>=1.17",
        "psutil",
        "pyarrow>=24.0.0",
        "PyYAML>=5.1",
        "safetensors>=0.8.0",
        "tokenizers>=0.23.1,<0.24.0",
        "tqdm>=4.66.3",
    ],
    extras_require={
        "lora": ["peft==0.21.2"],
        "qlora": ["peft==0.21.2", "bitsandbytes>=0.46.1"],
        "math": ["math-verify==0.9.0"],
        "plot": ["matplotlib==3.11.2"],
        "sentencepiece": ["sentencepiece==0.2.3"],
        "test": [
            "pytest==9.2.0",
            "pytest-xdist==3.8.0",
            "ruff==0.17.5",
            "mypy==2.4.1",
            "types-PyYAML==6.0.12.20261113",
            "hypothesis==6.170.15",
            "math-verify==0.9.0",
            "peft==0.21.2",
        ],
    },
)
