"""Loads a small operator through DeepSpeed, as an engine would, and prints "loaded".

The compiler is $CXX, see `test_op_builds.py`.
"""

import os
from pathlib import Path

from deepspeed.ops.op_builder.builder import OpBuilder

from dschat_ppo.run.op_builds import guard_builds

SOURCE = """
#include <Python.h>
static struct PyModuleDef toy = {PyModuleDef_HEAD_INIT, "toy", nullptr, -1, nullptr};
extern "C" PyObject* PyInit_toy() { return PyModule_Create(&toy); }
"""


class ToyBuilder(OpBuilder):
    """Compiles in a second, because it includes nothing of torch."""

    def __init__(self):
        super().__init__("toy")

    def absolute_name(self):
        return "toy"

    def sources(self):
        file = Path(os.environ["TORCH_EXTENSIONS_DIR"], "toy.cpp")
        if not file.exists():
            file.write_text(SOURCE)
        return [str(file)]

    def is_compatible(self, verbose=False):
        return True


guard_builds()
ToyBuilder().load(verbose=False)
print("loaded")
