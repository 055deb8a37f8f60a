"""The low-level interface: each stage of a kernel that saves intermediates, by itself.

| stage | names |
| --- | --- |
| graph | `generate_inference_graph`, `generate_forward_and_backward_graph` |
| source of a step | `generate_triton_code_str`, `compile_triton_code_str` |
| metadata | `FlexSNInfo`, `extract_info` |
| kernels from a source | `get_flexsn_inference_kernel`, `get_flexsn_inference_final_state_kernel`, `get_flexsn_forward_kernel`, \
  `get_flexsn_backward_kernel` |
| kernels from a core | `build_inference_kernel`, `build_inference_final_state_kernel`, `build_training_kernels` |
| launch | `flexsn_inference`, `flexsn_inference_final_state`, `flexsn_forward`, `flexsn_backward`, `flexsn_backward_ncl_bucket` |
| handles | `FlexSNKernelHandle`, `register_flexsn_kernel_handle`, `get_flexsn_kernel_handle`, `retain_flexsn_kernel_handle`, \
  `retain_owner_flexsn_kernel_handle`, `release_flexsn_kernel_handle`, `release_active_flexsn_kernel_handle`, \
  `attach_flexsn_handle_finalizer` |
| scans | `flex_sn_scan`, `FlexSNScan`, `dynamo_hop_available`, `eager_scan`, `eager_scan_final_state`, `lowerable_scan`, \
  `lowerable_scan_final_state`, `lowerable_scan_available`, `lowerable_while_loop_scan`, `lowerable_while_loop_scan_final_state`, \
  `lowerable_while_loop_available` |
| modules | `FlexSN`, `FlexSNKernel` |
| operators | `flexsn_inductor_inference`, `flexsn_inductor_inference_final_state`, `flexsn_inductor_training`, \
  `flexsn_inductor_training_final_state`, `flexsn_inductor_backward` (also under `torch.ops.flexsn`) |

Time comes first: sequences are `[T, *shape]`, states `[*shape]`. Results are contiguous, on the operands' device, and share
no memory with arguments or each other; their dtypes and shapes are those of the traced core (of a state that the core broadcasts,
the shape that it comes to), and final states keep the dtypes of the initial ones. `flexsn.scan` and `flexsn.FlexSN` need none of this.
"""

from .._torch_compile.hop import FlexSNScan, dynamo_hop_available, flex_sn_scan
from .._torch_compile.loops import (
    eager_scan,
    eager_scan_final_state,
    lowerable_scan,
    lowerable_scan_available,
    lowerable_scan_final_state,
    lowerable_while_loop_available,
    lowerable_while_loop_scan,
    lowerable_while_loop_scan_final_state,
)
from ..module import FlexSN
from .graphs import generate_forward_and_backward_graph, generate_inference_graph
from .handles import (
    FlexSNKernelHandle,
    attach_flexsn_handle_finalizer,
    get_flexsn_kernel_handle,
    register_flexsn_kernel_handle,
    release_active_flexsn_kernel_handle,
    release_flexsn_kernel_handle,
    retain_flexsn_kernel_handle,
    retain_owner_flexsn_kernel_handle,
)
from .info import FlexSNInfo, extract_info
from .kernels import (
    build_inference_final_state_kernel,
    build_inference_kernel,
    build_training_kernels,
    get_flexsn_backward_kernel,
    get_flexsn_forward_kernel,
    get_flexsn_inference_final_state_kernel,
    get_flexsn_inference_kernel,
)
from .launch import flexsn_backward, flexsn_backward_ncl_bucket, flexsn_forward, flexsn_inference, flexsn_inference_final_state
from .operators import (
    flexsn_inductor_backward,
    flexsn_inductor_inference,
    flexsn_inductor_inference_final_state,
    flexsn_inductor_training,
    flexsn_inductor_training_final_state,
)
from .source import compile_triton_code_str, generate_triton_code_str
from .stateless import FlexSNKernel

__all__ = [
    "FlexSN", "FlexSNInfo", "FlexSNKernel", "FlexSNKernelHandle", "FlexSNScan", "attach_flexsn_handle_finalizer",
    "build_inference_final_state_kernel", "build_inference_kernel", "build_training_kernels", "compile_triton_code_str",
    "dynamo_hop_available", "eager_scan", "eager_scan_final_state", "extract_info", "flex_sn_scan", "flexsn_backward",
    "flexsn_backward_ncl_bucket", "flexsn_forward", "flexsn_inductor_backward", "flexsn_inductor_inference",
    "flexsn_inductor_inference_final_state", "flexsn_inductor_training", "flexsn_inductor_training_final_state", "flexsn_inference",
    "flexsn_inference_final_state", "generate_forward_and_backward_graph", "generate_inference_graph", "generate_triton_code_str",
    "get_flexsn_backward_kernel", "get_flexsn_forward_kernel", "get_flexsn_inference_final_state_kernel", "get_flexsn_inference_kernel",
    "get_flexsn_kernel_handle", "lowerable_scan", "lowerable_scan_available", "lowerable_scan_final_state",
    "lowerable_while_loop_available", "lowerable_while_loop_scan", "lowerable_while_loop_scan_final_state",
    "register_flexsn_kernel_handle", "release_active_flexsn_kernel_handle", "release_flexsn_kernel_handle", "retain_flexsn_kernel_handle",
    "retain_owner_flexsn_kernel_handle",
]  # fmt: skip
