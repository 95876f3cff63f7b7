"""Speculative decoding on JAX/XLA: a drafter proposes a tree of tokens, the target checks it in one forward pass, and what
comes out is exactly what the target alone would have produced.

    import jaxspec
    params = jaxspec.load("smollm2-135m")
    print(jaxspec.generate(params, "Why is the sky blue?").text)

Axis letters, everywhere in this project (einsums and shape annotations alike):

    B  sequences                     E  model width
    T  query tokens or tree nodes    F  feed-forward width
    L  cached positions              V  vocabulary
    H  query heads                   P  pages in the pool
    K  key/value heads               S  slots per page
    G  H // K                        N  pages per sequence
    D  head size                     M  in-flight cache entries
    A  accepted path, root included  W  32-bit words of a bit mask
    X  experts

SGLang's S, k and N for num_steps, topk and num_draft_tokens are always spelled out.
"""

from jaxspec.config import ConfigError, ModelConfig, SpecConfig
from jaxspec.conversion import convert
from jaxspec.drafters.dflash.config import DFlashOptions, DSparkOptions
from jaxspec.drafters.eagle.config import EagleOptions, PEagleOptions
from jaxspec.drafters.kinds import Kind, register
from jaxspec.drafters.mtp.config import MtpOptions
from jaxspec.drafters.ngram.config import NgramConfig
from jaxspec.drafters.ngram.history import NgramHistory
from jaxspec.drafters.options import DraftOptions
from jaxspec.drafters.standalone.config import StandaloneOptions
from jaxspec.drafters.uno.config import UnoOptions
from jaxspec.engine.config import EngineConfig
from jaxspec.engine.engine import Engine
from jaxspec.engine.handle import EngineStats, EngineStopped, LaunchFailed
from jaxspec.engine.messages import NotANumber, QueueFull
from jaxspec.generation import generate, stream
from jaxspec.loading import load, load_draft
from jaxspec.models.forward import forward
from jaxspec.params import DraftParams, ModelParams
from jaxspec.results import GenerationResult, Stats, StreamChunk
from jaxspec.sampling import SamplingParams

__all__ = [
    "ConfigError",
    "DFlashOptions",
    "DSparkOptions",
    "DraftOptions",
    "DraftParams",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "EngineStopped",
    "EagleOptions",
    "GenerationResult",
    "LaunchFailed",
    "Kind",
    "ModelConfig",
    "ModelParams",
    "MtpOptions",
    "NgramConfig",
    "NgramHistory",
    "NotANumber",
    "PEagleOptions",
    "QueueFull",
    "SamplingParams",
    "SpecConfig",
    "StandaloneOptions",
    "Stats",
    "StreamChunk",
    "UnoOptions",
    "convert",
    "forward",
    "generate",
    "load",
    "load_draft",
    "register",
    "stream",
]
