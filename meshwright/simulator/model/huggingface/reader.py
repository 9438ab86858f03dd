"""Typed reading of a config.json, and the keys that change no size of a model."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, NoReturn

from meshwright.simulator.errors import PlanError, shorten

# Keys that any config.json may carry and that change neither shapes nor training cost.
_HARMLESS_KEYS = """
    architectures bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id id2label initializer_range is_decoder label2id
    layer_norm_epsilon layer_norm_eps length_penalty max_length min_length model_type
    no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences
    output_attentions output_hidden_states output_scores pad_token_id prefix problem_type
    repetition_penalty return_dict return_dict_in_generate rms_norm_eps sep_token_id
    suppress_tokens task_specific_params temperature tokenizer_class top_k top_p torch_dtype
    torchscript transformers_version typical_p unk_token_id use_cache
    """
HARMLESS_KEYS = frozenset(_HARMLESS_KEYS.split())
# Upper limit of sequence lengths and windows.
MAX_TOKENS = 134_217_728
# MTP layers: transformers trains none, so that a job has to ask for them.
PREDICTION_KEYS = ("num_mtp_layers", "num_nextn_predict_layers")
# Keys that change no size but the computation of a step, with the warning that results carry.
CHANGING_NO_SIZE = {
    "attn_temperature_tuning": "scales queries by their position, which is not modelled",
    "llama_4_scaling_beta": "scales queries by their position, which is not modelled",
    "logits_scaling": "divides the logits, which is not modelled",
    **dict.fromkeys(
        (*PREDICTION_KEYS, "num_mtp_modules"), "predict tokens beyond the next, which is left out"
    ),
    "quantization_config": "is of released weights; training is in the precision of the job",
    "residual_multiplier": "scales what each layer adds, which is not modelled",
    "router_jitter_noise": "moves tokens before they are routed, which is not modelled",
}
# Their neutral values, other than zero and false.
CHANGING_NOTHING = {"logits_scaling": 1, "residual_multiplier": 1}
# Keys of layers that are not modelled, whatever the model_type, with their name for refusals.
NOT_MODELLED = {
    **dict.fromkeys(
        ("mamba_n_heads", "mamba_num_heads", "mamba_d_state", "ssm_cfg", "state_size"),
        "state-space layers",
    ),
    **dict.fromkeys(
        ("linear_num_key_heads", "linear_attn_config", "linear_attn_alpha_factor"),
        "linear attention",
    ),
    "index_topk": "attention to tokens that an indexer chooses",
    "conv_L_cache": "layers of short convolutions",
    "zero_expert_num": "experts that do nothing",
    "altup_num_inputs": "layers with several residual streams",
    "logit_scale": "norms without a bias that subtract the mean",
    "is_encoder_decoder": "an encoder beside a decoder",
}


class Reader:
    """Typed access to a configuration, with errors that name file, key and value."""

    def __init__(self, config: Mapping[str, object], origin: str) -> None:
        self._config = config
        self._origin = origin

    def size(self, *keys: str) -> int:
        """Return a required positive integer, under any of its names."""
        size = self.optional_size(*keys)
        if size is None:
            raise PlanError(f"{self._origin}: {' or '.join(keys)} is missing")
        return size

    def optional_size(self, *keys: str) -> int | None:
        """Return a positive integer, or None where it is absent or null."""
        found: dict[str, int] = {}
        for key in keys:
            value = self._config.get(key)
            if value is None:
                continue
            # JSON's true is an int in Python.
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                self.refuse(key, "must be an integer of at least 1")
            for other, size in found.items():
                if value != size:
                    self.refuse(key, f"disagrees with {other}={size}")
            found[key] = value
        return next(iter(found.values()), None)

    def count(self, key: str, *, default: int) -> int:
        """Return an integer of at least 0, or *default* where it is absent or null."""
        value = self._config.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self.refuse(key, "must be an integer of at least 0")
        return value

    def refuse_listed(self, key: str) -> None:
        """Raise PlanError unless a list is empty or absent."""
        if self._config.get(key) not in (None, []):
            self.refuse(key, "is not supported; it must be empty")

    def switch(self, key: str, *, default: bool) -> bool:
        """Return a boolean, or the configuration class's *default* where it is absent."""
        value = self._config.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "must be true or false")
        return value

    def text(self, key: str, *, default: str) -> str:
        """Return a string, or the configuration class's *default* where it is absent."""
        value = self._config.get(key, default)
        if not isinstance(value, str):
            self.refuse(key, "must be a text")
        return value

    def number(self, key: str, *, default: float) -> float:
        """Return a number of at least 0; null is 0."""
        value = self._config.get(key, default)
        if value is None:
            return 0.0
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            self.refuse(key, "must be a number of at least 0")
        return float(value)

    def value(self, key: str) -> object:
        """Return the unchecked value of a key, None where it is absent."""
        return self._config.get(key)

    def layer_pattern(self, *, usual: str, windowed: str = "sliding_attention") -> str:
        """Return the shortest period of layers, W with a window and F with full attention."""
        types = self._config.get("layer_types")
        if types is None:
            return usual
        known = {windowed: "W", "full_attention": "F"}
        if not isinstance(types, list) or not types or not all(each in known for each in types):
            self.refuse("layer_types", f"is not supported; each must be of {', '.join(known)}")
        return period(self, "layer_types", [known[each] for each in types])

    def inside(self, key: str) -> "Reader":
        """Return a reader of an object, empty where it is absent or null."""
        value = self._config.get(key)
        if not isinstance(value, dict | None):
            self.refuse(key, "must be an object or null")
        return Reader(value or {}, f"{self._origin}: {key}")

    def rotary_fraction(self, *names: str, default: float = 1.0) -> float:
        """Return the fraction of a head with RoPE, given here or among the RoPE parameters."""
        for reader in (self, self.inside("rope_parameters"), self.inside("rope_scaling")):
            for name in (*names, "partial_rotary_factor"):
                if reader.has(name):
                    return reader.number(name, default=default)
        return default

    def nested(self, key: str, architecture: "Architecture") -> "Reader":
        """Return a reader of an object that is a configuration of its own."""
        if not self.has(key):
            raise PlanError(f"{self._origin}: {key} is missing")
        inner = self.inside(key)
        inner.refuse_unknown_keys(architecture)
        return inner.with_defaults(architecture)

    def with_defaults(self, architecture: "Architecture") -> "Reader":
        """Return a reader with the configuration class's defaults for absent keys."""
        return Reader(completed(self._config, architecture), self._origin)

    def activation(self, key: str) -> str:
        """Return the activation of an MLP without a gate: one-kernel GELU, or the default."""
        return "gelu" if self.text(key, default="gelu") == "gelu" else "usual"

    def has(self, key: str) -> bool:
        """Return True if a key is present and not null."""
        return self._config.get(key) is not None

    def dropout(self, *keys: str, default: float) -> bool:
        """Return True if any of these dropout probabilities is above zero."""
        found = {key: self._config.get(key, default) for key in keys}
        for key, value in found.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
                self.refuse(key, "must be a probability, at least 0 and below 1")
        return any(found.values())

    def original_positions(self) -> int | None:
        """Return the sequence length of pre-training, before RoPE scaling, if it is given."""
        for key in ("rope_scaling", "rope_parameters"):
            inner = self.inside(key)
            if inner.has("full_attention"):  # parameters of each kind of layers
                inner = inner.inside("full_attention")
            if self.has(key):
                return inner.optional_size("original_max_position_embeddings")
        return None

    def refuse_unknown_keys(self, architecture: "Architecture") -> None:
        """Raise PlanError for an unknown key that might change the architecture."""
        for key, value in self._config.items():
            # Keys with an underscore are private attributes that transformers serialises.
            known = key in architecture.keys or key in HARMLESS_KEYS or key.startswith("_")
            switches_nothing_on = value is None or value is False or value in ({}, [])
            if not known and not switches_nothing_on:
                raise PlanError(
                    f"{self._origin}: {shorten(key)}={shorten(value)} is not supported for "
                    f"model_type={self._config.get('model_type')}; "
                    f"supported keys: {', '.join(sorted(architecture.keys))}"
                )

    def refuse(self, key: str, rule: str) -> NoReturn:
        """Raise PlanError for the value of *key*, which violates *rule*."""
        raise PlanError(f"{self._origin}: {key}={shorten(self._config.get(key))} {rule}")


class Architecture(NamedTuple):
    """Reader of one model_type, its allowed keys, and the defaults of its configuration class.

    The defaults are those of the configuration class in transformers 5.23, whatever a released
    model has.  A null is not an absent key: ``q_lora_rank`` or ``sliding_window`` is then off.
    """

    read: Callable[[Reader], dict[str, object]]
    keys: frozenset[str]
    defaults: Mapping[str, object] = MappingProxyType({})


def completed(config: Mapping[str, object], architecture: Architecture) -> dict[str, object]:
    """Return a configuration with the defaults of its class.

    Null RoPE parameters count as absent: classes fill them in when they are constructed.
    """
    absent = {"rope_parameters"} & architecture.defaults.keys()
    given = {key: each for key, each in config.items() if each is not None or key not in absent}
    return {**architecture.defaults, **given}


def numbers(reader: Reader, key: str) -> list[int]:
    """Return a list of integers of at least 0, empty where it is absent or null."""
    value = reader.value(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(type(each) is int and each >= 0 for each in value):
        reader.refuse(key, "must be a list of integers of at least 0")
    return [int(each) for each in value]


def same_size(reader: Reader, key: str) -> int:
    """Return a required positive integer; a list of one for each layer must repeat it."""
    value = reader.value(key)
    if not isinstance(value, list):
        return reader.size(key)
    if not value or any(type(each) is not int or each < 1 or each != value[0] for each in value):
        reader.refuse(key, "is not supported; it must be one integer of at least 1 in all layers")
    return int(value[0])


def period(reader: Reader, key: str, letters: list[str]) -> str:
    """Return the shortest period of *letters*, one for each layer."""
    if len(letters) != reader.size("num_hidden_layers"):
        reader.refuse(key, "must have one entry a layer")
    return _shortest_period("".join(letters))


def _shortest_period(letters: str) -> str:
    """Return the shortest prefix that, repeated, gives all *letters*.

    >>> _shortest_period("WFWFW"), _shortest_period("WWF"), _shortest_period("FF")
    ('WF', 'WWF', 'F')
    """
    count = len(letters)
    repeats = (letters[:size] for size in range(1, count + 1))
    return next(each for each in repeats if (each * count)[:count] == letters)
