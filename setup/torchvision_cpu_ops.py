"""Makes a CUDA build of torchvision importable beside a CPU build of torch.

Installed only where that is the case.

Why: on some package registries torchvision's only wheel is the CUDA build. Its compiled operators
do not load beside a CPU torch, and `import torchvision` dies with "operator torchvision::nms does
not exist". The Qwen2.5-VL processors use its transforms only, which need no operator, so declaring
the two operators that the import asks for is enough.

How: `setup/install.sh` copies this file into site-packages next to a `.pth` line that imports it,
because vLLM inspects model classes in a subprocess: the declaration has to reach every interpreter
of the environment. It costs nothing until torchvision is first imported, and nothing at all on a
machine with CUDA.
"""

import importlib.abc
import sys

SCHEMAS = tuple(
    f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms")
)
_libraries = []  # torch drops the declarations when their Library object is collected


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Declares the operators at the first import of torchvision, then steps aside."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None:
                library = torch.library.Library("torchvision", "DEF")
                for schema in SCHEMAS:
                    library.define(schema)
                _libraries.append(library)
        return


sys.meta_path.insert(0, _BeforeTorchvision())
