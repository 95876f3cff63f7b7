"""Static description of a block draft: one dataclass with flags for DFlash, DFlash2, DSpark and causal heads."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from jaxspec.config import ConfigError, ModelConfig
from jaxspec.drafters.options import WindowOptions

MARKOV_KINDS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class DFlashOptions(WindowOptions):
    """What can be set for block drafts: the window, which must not be smaller than a block."""


@dataclass(frozen=True)
class DSparkOptions(DFlashOptions):
    """What can be set for DSpark drafts, beside the window.

    Attributes:
      min_draft_survival: DSPARK with a confidence head: a chain ends before the first draft whose estimated probability of
        being reached and accepted is below this; 0.0 verifies the whole block.
    """

    min_draft_survival: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        if not 0.0 <= self.min_draft_survival < 1.0:
            raise ConfigError(f"min_draft_survival={self.min_draft_survival} must lie in [0, 1); 0.0 verifies the whole block")

    @property
    def chains_only(self) -> bool:
        """Only chains are ended by what a draft estimates."""
        return self.min_draft_survival > 0


@dataclass(frozen=True)
class DFlashConfig:
    """A draft that fills a whole block of tokens in one pass (DFlash, arXiv 2602.06036) or one of its descendants.

    Attributes:
      layers: shapes of the draft's transformer layers; `windows` says which of them slide.
      taps: hidden-state indices of the target's features (`models.decoder.decode`).
      target_hidden_size: width of one tap.
      draft_vocab_size: rows of the head; smaller than the target's vocabulary when `reduced_vocab`.
      block_size: slots of a block: the last emitted token (the anchor), then mask tokens.
      mask_token_id: the token in the slots that are to be filled.
      anchor_predicts: slot m predicts the token *behind* it, so a block of n slots gives n drafts (DSpark, DeepSpec); else
        slot m predicts the token *at* its own position and the anchor's output is dropped: n - 1 drafts (z-lab's DFlash).
      causal: for every layer, whether its slots see only slots before them; else the block sees itself both ways. A sliding
        layer that is not causal has a symmetric window.
      causal_head: trained for trees from one pass (JetSpec, arXiv 2606.18394), whose way of growing them is then followed.
      own_embedding, own_head: the draft has its own table or output matrix; else it uses the target's, without the target's
        embedding scale and soft cap.
      reduced_vocab: draft ids differ from target ids; the parameter ``target_ids`` translates.
      embedding_scale, output_multiplier, logit_softcap: of the block's embeddings and of the draft's logits.
      conv_kernel, conv_group: taps of DFlash2's dynamic convolutions, and channels that share a dynamic tap; 0 for none.
      selector_rank, selector_top_k: DFlash2's candidate selector; 0 for none.
      markov_rank, markov: DSpark's correction by the token before: its rank (0 for none) and kind ("vanilla", "gated", "rnn").
      confidence: what DSpark's acceptance estimate reads: "hidden", "markov" (hidden and the embedding of the token before),
        or None.
      num_target_layers: layers of the target that it was made for, which the published loaders want to read; None: unknown.
      layout: naming of the checkpoint, for the way back: "zlab", "deepspec", "speculators", "transformers".
    """

    layers: ModelConfig
    taps: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int
    block_size: int
    mask_token_id: int
    anchor_predicts: bool = False
    causal: tuple[bool, ...] = ()
    causal_head: bool = False
    own_embedding: bool = False
    own_head: bool = False
    reduced_vocab: bool = False
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    logit_softcap: float | None = None
    conv_kernel: int = 0
    conv_group: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    markov_rank: int = 0
    markov: str | None = None
    confidence: str | None = None
    num_target_layers: int | None = dataclasses.field(default=None, compare=False)
    layout: str = "zlab"

    def __post_init__(self):
        if not self.causal:
            object.__setattr__(self, "causal", (self.causal_head,) * self.layers.num_layers)
        for name, own in (("embedding", self.own_embedding), ("head", self.own_head)):
            if not own and self.layers.hidden_size != self.target_hidden_size:
                raise ConfigError(
                    f"a draft of width {self.layers.hidden_size} cannot use the {name} of a target of width "
                    f"{self.target_hidden_size}: it needs one of its own"
                )
        if not 0 <= self.mask_token_id < self.layers.vocab_size:
            raise ConfigError(
                f"mask_token_id={self.mask_token_id} must lie in the vocabulary of {self.layers.vocab_size} tokens: the mask "
                "token needs a row of the embedding"
            )
        if self.num_drafts < 1:
            smallest = 1 if self.anchor_predicts else 2
            raise ConfigError(f"block_size={self.block_size} leaves no draft: it must be at least {smallest}")
        if self.markov is not None and self.markov not in MARKOV_KINDS:
            raise ConfigError(f"markov={self.markov!r} must be one of {', '.join(MARKOV_KINDS)}")
        if self.markov is not None and self.selector_rank:
            raise ConfigError("a draft has a Markov head or a candidate selector, not both")

    @property
    def num_drafts(self) -> int:
        """Tokens that one block drafts."""
        return self.block_size if self.anchor_predicts else self.block_size - 1

    @property
    def sequential(self) -> bool:
        """Whether a draft's distribution depends on the draft before it (Markov head, candidate selector)."""
        return self.markov is not None or self.selector_rank > 0

    @property
    def algorithm(self) -> str:
        """SGLang's name: DSPARK for drafts with a Markov or confidence head, DFLASH for all others."""
        return "DSPARK" if self.markov is not None or self.confidence is not None else "DFLASH"

    @property
    def hidden_size(self) -> int:
        """Width of the draft."""
        return self.layers.hidden_size

    @property
    def feature_size(self) -> int:
        """Width of what the target hands over: all taps side by side."""
        return len(self.taps) * self.target_hidden_size

    def to_json(self) -> dict:
        """Plain JSON types; `from_json` gives the same config back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict) -> DFlashConfig:
        """The inverse of `to_json`. Raises ConfigError for unknown keys."""
        data = dict(data)
        unknown = set(data) - {f.name for f in dataclasses.fields(cls)}
        if unknown:
            raise ConfigError(f"unknown keys in a DFlash config: {sorted(unknown)}")
        data["layers"] = ModelConfig.from_json(data["layers"])
        return cls(**data | {key: tuple(data[key]) for key in ("taps", "causal") if key in data})


def default_taps(target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """Hidden-state indices of the taps where a file names none.

    z-lab spreads one tap per draft layer evenly over the outputs of layers 1 … L - 3; one draft layer taps layer L // 2. The
    output of layer i is hidden state i + 1.
    """
    if draft_layers == 1:
        return (target_layers // 2 + 1,)
    span = target_layers - 4
    return tuple(round(1 + i * span / (draft_layers - 1)) + 1 for i in range(draft_layers))


def check_target(config: DFlashConfig, target: ModelConfig) -> None:
    """Raises ConfigError unless the draft reads what this target gives."""
    if config.target_hidden_size != target.hidden_size:
        raise ConfigError(
            f"the draft was made for a target of hidden size {config.target_hidden_size}, this one has {target.hidden_size}"
        )
    if config.layers.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the draft was made for a vocabulary of {config.layers.vocab_size} tokens, the target has {target.vocab_size}"
        )
    beyond = [t for t in config.taps if not 0 <= t <= target.num_layers]
    if beyond:
        raise ConfigError(
            f"the draft reads hidden states {config.taps}, but the target has {target.num_layers} layers: {beyond} do not exist"
        )
