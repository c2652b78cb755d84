"""Reading, naming and listing adapters needs neither torch nor a network."""

import subprocess
import sys

CODE = """
import sys
from multilora_cli.adapters import peft, registry, source, digest
heavy = {"torch", "triton", "transformers", "peft", "huggingface_hub", "starlette"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
from multilora_cli.adapters.peft import read_adapter
"""


def test_front_side_imports_no_torch() -> None:
    """The planner and the front import these modules: they must start in a blink."""
    subprocess.run([sys.executable, "-c", CODE], check=True)
