"""Generate the Python code of `inference.proto`. `make proto` runs this; it needs the `dev` extra."""

import re
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

HERE = Path(__file__).resolve().parent
GENERATED = ("inference_pb2.py", "inference_pb2.pyi", "inference_pb2_grpc.py")


def generate(target: Path) -> None:
    """Write the generated files into `target`."""
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as folder:
        # The virtual folder names the file `intarsia/proto/inference.proto` in every descriptor, wherever it lies.
        arguments = [
            "protoc",
            f"-Iintarsia/proto={HERE}",
            f"-I{files('grpc_tools') / '_proto'}",
            f"--python_out={folder}",
            f"--pyi_out={folder}",
            f"--grpc_python_out={folder}",
            "intarsia/proto/inference.proto",
        ]
        if protoc.main(arguments) != 0:
            sys.exit("protoc failed")
        for name in GENERATED:
            code = (Path(folder) / "intarsia" / "proto" / name).read_text()
            code = re.sub(r"^from intarsia\.proto import (\w+)", r"from . import \1", code, flags=re.MULTILINE)
            (target / name).write_text(code)


if __name__ == "__main__":
    generate(HERE)
