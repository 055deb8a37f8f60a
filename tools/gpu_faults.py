"""What `tools/gpu_memcheck.sh` must find: a kernel that is told of more neurons than its arrays have (`overrun`), and one whose
input nobody wrote (`unwritten`)."""

import sys

import torch

import flexsn
from flexsn._program.cache import PROGRAMS

x = torch.ones(4, 1000, device="cuda")
flexsn.scan(lambda x, v: (x * 0.5 + v, v + x), [x], [None], backend="triton")
(program,) = [made[0] for made in PROGRAMS.exact.values() if isinstance(made, tuple)]
(kernel,) = program._kernels.values()
if sys.argv[1] == "unwritten":
    x = torch.empty(4, 1000, device="cuda")
present = [a.role == "x0" for a in kernel.plan.reads] + [True] * len(kernel.plan.writes)
run = kernel.bind(present, 4, 100_000 if sys.argv[1] == "overrun" else 1000)
run([x, *[torch.empty(4, 1000, device="cuda") for _ in kernel.plan.writes]], [])
torch.cuda.synchronize()
