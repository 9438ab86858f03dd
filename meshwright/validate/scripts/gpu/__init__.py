"""A GPU that is not there, and the tensors of a script, on it or on its host."""

from meshwright.validate.scripts.gpu.attention import gpu_attention
from meshwright.validate.scripts.gpu.autocast import gpu_autocast
from meshwright.validate.scripts.gpu.cuda import idle_gpu
from meshwright.validate.scripts.gpu.fakes import gpu_of_fakes
from meshwright.validate.scripts.gpu.memories import ScriptMemories
from meshwright.validate.scripts.gpu.names import GpuNames
from meshwright.validate.scripts.gpu.tensors import ScriptRefusedError, ScriptTensors

__all__ = [
    "GpuNames",
    "ScriptMemories",
    "ScriptRefusedError",
    "ScriptTensors",
    "gpu_attention",
    "gpu_autocast",
    "gpu_of_fakes",
    "idle_gpu",
]
