"""Loading TorchScript without giving it access to files or other libraries.

TorchScript cannot call Python, but some of its operators read and write files, and its text can hide their names. The
operators in the compiled graph are therefore checked: unless the file is trusted, only operators that are known to do
nothing but compute may run. Loading a program already runs its `__setstate__` methods, so a file with any is refused
before it is loaded.
"""

import re
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from themis.errors import DataError, first_line
from themis.target.compiled import all_nodes
from themis.target.loaders.weights import Trust


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LOADING_CODE = re.compile(rb"__setstate__|torch[\s.]+classes")
"""Found in programs that run code while they are loaded, by a method of theirs or by an object of a C++ class."""
TENSOR_RECORDS = re.compile(r"(data|constants)/\d+|\.data/.*|version|byteorder")
"""Records that are not parsed as code."""
PRIM_OPERATORS = _names(
    "Constant ConstantChunk CreateObject DictConstruct EnumName EnumValue GetAttr If IfThenElse ListConstruct "
    "ListUnpack Loop ModuleContainerIndex NumToTensor Print RaiseException SetAttr StringIndex TupleConstruct "
    "TupleIndex TupleSlice TupleUnpack Uninitialized abs annotate data device dtype grad index is_cpu is_cuda is_ipu "
    "is_maia is_meta is_mkldnn is_mps is_mtia is_nested is_quantized is_sparse is_sparse_csr is_vulkan is_xla is_xpu "
    "isinstance itemsize layout max min name nbytes rangelist requires_grad shape tolist type unchecked_cast "
    "unchecked_unwrap_optional"
)
PRIVATE_OPERATORS = _names(
    "_adaptive_avg_pool2d _adaptive_avg_pool3d _assert_async _assert_scalar _assert_tensor_metadata _cast_Byte "
    "_cast_Char _cast_Double _cast_Float _cast_Half _cast_Int _cast_Long _cast_Short _convolution _convolution_mode "
    "_get_tracing_state _infer_size _is_all_true _is_any_true _list_to_tensor _log_softmax "
    "_native_batch_norm_legit_no_training _native_multi_head_attention _pack_padded_sequence _pad_packed_sequence "
    "_prelu_kernel _reshape_from_tensor _safe_softmax _set_item _shape_as_tensor _size_if_not_equal _softmax _stack "
    "_tensor_to_list _to_copy _transformer_encoder_layer_fwd _unsafe_view _unwrap_optional _upsample_bicubic2d_aa "
    "_upsample_bilinear2d_aa _upsample_lanczos2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d _weight_norm"
)
"""Private aten operators that compiled models call; other private operators check their arguments less."""
TEXT_OPERATORS = _names(
    "Delete Float Int __contains__ __getitem__ __interpolate __upsample _assert_async _assert_scalar _convolution_mode "
    "_set_item add any append capitalize center clear conv1d conv2d conv3d copy count device dict div div_ divide "
    "divide_ einsum endswith eq expandtabs find format ge gelu gelu_ get gt hash index index_reduce index_reduce_ "
    "insert isalnum isalpha isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper items "
    "join keys le len linalg_cond linalg_eigh linalg_eigvalsh linalg_lstsq linalg_matrix_norm linalg_norm linalg_qr "
    "linalg_svd linalg_svdvals list ljust lower lstrip lt meshgrid nanquantile ne ord pad pad_sequence partition "
    "percentFormat pop popitem quantile remove replace rfind rindex rjust rpartition rsplit rstrip scatter scatter_ "
    "scatter_reduce scatter_reduce_ searchsorted segment_reduce setdefault slice sort sorted split splitlines "
    "startswith stft str strip swapcase title update upper values warn zfill"
) | {f"fft_{name}fft{n}" for name in ("", "h", "i", "ih", "ir", "r") for n in ("", "2", "n")}
"""Operators of aten that take text but use it only to compute; text for other operators may be a file name."""
VISION_OPERATORS = _names("deform_conv2d nms ps_roi_align ps_roi_pool roi_align roi_pool")


def load_script(path: Path, trust: Trust) -> nn.Module:
    """Load a TorchScript program; refuses one that may do more than compute, unless it is trusted."""
    is_trusted = trust.covers(path)
    if not is_trusted and (reason := _runs_on_loading(path)):
        trust.require(path, f"TorchScript that runs code when it is loaded ({reason})", "save it without")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            module: nn.Module = torch.jit.load(path, map_location="cpu")  # type: ignore[no-untyped-call]
        doubtful = [] if is_trusted else find_doubtful(module)
    except (RuntimeError, OSError, ValueError) as error:
        raise DataError(f"{path} must be a TorchScript program that loads: {first_line(error)}") from error
    if doubtful:
        kind = f"TorchScript that may read and write files: it uses {', '.join(doubtful[:3])}"
        trust.require(path, kind, "use a program that does not")
    return module


def _runs_on_loading(path: Path) -> str:
    """What a file would run while it is loaded, or empty; it is read in the same way as by `torch.jit.load`."""
    try:
        archive = torch._C.PyTorchFileReader(str(path))
        names = archive.get_all_records()
    except (RuntimeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} must be a TorchScript program that loads: {first_line(error)}") from error
    if "model.json" in names:
        return "a format of PyTorch before 1.3"
    for name in names:
        if not TENSOR_RECORDS.fullmatch(name) and (found := LOADING_CODE.search(archive.get_record(name))):
            return "a C++ class" if b"classes" in found[0] else "__setstate__"
    return ""


def find_doubtful(module: Any) -> list[str]:
    """Operators and objects in the methods of a program that may do more than compute."""
    modules = [part._c for part in module.modules()]
    own_types = {part._type().qualified_name() for part in modules}
    doubtful: dict[str, None] = {}
    for part in modules:
        if part._properties():
            doubtful["a property"] = None
        methods = [part._get_method(name) for name in part._method_names()]
        for function in (*methods, *part._get_forward_hooks(), *part._get_forward_pre_hooks()):
            graph = function.graph.copy()
            torch._C._jit_pass_inline(graph)
            for node in all_nodes(graph):
                takes_text = any(_holds_text(value.type()) for value in node.inputs())
                if not _is_harmless(node.kind(), takes_text):
                    doubtful[node.kind()] = None
                for value in node.outputs():
                    doubtful |= dict.fromkeys(f"the class {name}" for name in _classes(value.type()) - own_types)
    return list(doubtful)


def _classes(kind: Any) -> set[str]:
    """The classes in a type; operators such as sorting call their methods, which the graph does not show."""
    if kind.kind() in ("ClassType", "InterfaceType"):
        return {kind.qualified_name()}
    return set().union(*map(_classes, kind.containedTypes()))


def _holds_text(kind: Any) -> bool:
    """Whether a value of a type may be or contain text."""
    return kind.kind() in ("StringType", "AnyType") or any(map(_holds_text, kind.containedTypes()))


@cache
def _is_harmless(kind: str, takes_text: bool) -> bool:
    """Whether an operator only computes; `takes_text`: whether it gets text here, which may be a file name."""
    namespace, _, name = kind.partition("::")
    if namespace == "prim":
        return name in PRIM_OPERATORS
    if namespace == "torchvision":
        return name in VISION_OPERATORS
    if namespace not in ("aten", "quantized"):
        return False
    if name.startswith("_") and not name.startswith("__") and name not in PRIVATE_OPERATORS:
        return False
    is_known = bool(torch._C._jit_get_schemas_for_operator(kind))
    return is_known and (not takes_text or (namespace == "aten" and name in TEXT_OPERATORS))
