"""The shape of a model: what its layers keep of keys and values, and what weights a forward reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Weights:
    """Weights that a forward multiplies with, in parameters; embeddings are not: a token reads one row of them.

    Args:
        body: parameters that every token is multiplied with, except the head.
        head: parameters of the output head, which a prefill applies to the last token of a sequence only.
        experts: parameters of all routed experts of a mixture.
        active_share: experts per token over experts, 1.0 without a mixture.
        bytes_per_parameter: 2.0 in 16 bit.
        source: how they were counted, for people.
    """

    body: float
    head: float = 0
    experts: float = 0
    active_share: float = 1.0
    bytes_per_parameter: float = 2.0
    source: str = "given"

    @classmethod
    def of_bytes(cls, weight_bytes: float, parameters: float | None = None) -> Weights:
        """Weights of which only their bytes are known, read whole by every forward.

        Args:
            weight_bytes: bytes that a forward reads; 0 leaves attention alone.
            parameters: what a token is multiplied with; without it, that of 16 bit weights, ``weight_bytes / 2``.

        Raises:
            ValueError: a number is negative, or there are parameters without bytes.
        """
        parameters = weight_bytes / 2 if parameters is None else parameters
        if weight_bytes < 0 or parameters < 0 or bool(weight_bytes) != bool(parameters):
            raise ValueError(f"weights of {weight_bytes:g} bytes and {parameters:g} parameters: give both above 0")
        return cls(parameters, bytes_per_parameter=weight_bytes / parameters if parameters else 2.0)

    def read_bytes(self, tokens: int) -> float:
        """Bytes of weights that a forward of ``tokens`` tokens reads, each once.

        Of a mixture with a share ``a`` of its experts per token, the expectation under even routing: ``1 - (1 - a) **
        tokens`` of the experts are some token's. For one token that is ``a`` itself.
        """
        experts = self.experts * (1 - (1 - self.active_share) ** tokens)
        return (self.body + self.head + experts) * self.bytes_per_parameter

    def flops(self, tokens: int, sequences: int) -> float:
        """Multiplications and additions: 2 per parameter and token; the head's per sequence (Kaplan et al. 2020)."""
        return 2 * (tokens * (self.body + self.experts * self.active_share) + sequences * self.head)


@dataclass(frozen=True)
class ModelShape:
    """Attention layers of a decoder, by what they keep.

    Args:
        full_layers: layers that see every key.
        num_heads: query heads.
        num_kv_heads: heads of K and of V, a divisor of num_heads.
        head_dim: channels of a head of q, k, v and o.
        weights: of the whole model.
        windowed_layers: layers that see at most ``window`` keys (sliding windows, chunks).
        window: keys; above 0 where there are windowed layers.
        linear_layers: layers without K/V (linear attention, Mamba, convolutions): their weights count; their state,
            whose size does not depend on the context, does not.

    Raises:
        ValueError: a size is below 1, or num_heads is no multiple of num_kv_heads.
    """

    full_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    weights: Weights
    windowed_layers: int = 0
    window: int = 0
    linear_layers: int = 0

    def __post_init__(self) -> None:
        sizes = {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim}
        sizes["layers with K/V"] = self.kv_layers
        if self.windowed_layers:
            sizes["window"] = self.window
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} is {size}; give at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} heads are no multiple of {self.num_kv_heads} K/V heads; each K/V head serves as many"
            )

    @property
    def kv_layers(self) -> int:
        """Layers that keep K and V."""
        return self.full_layers + self.windowed_layers

    def describe_layers(self) -> str:
        """How many layers of each kind, for people."""
        kinds = (
            (self.full_layers, "full attention"),
            (self.windowed_layers, f"windowed (at most {self.window:,} keys)"),
            (self.linear_layers, "without K/V (linear)"),
        )
        return ", ".join(f"{count} {kind}" for count, kind in kinds if count)

    def kept_keys(self, context: int) -> int:
        """Keys of one sequence that one query reads, over all layers: a window at most, where a layer has one."""
        return self.full_layers * context + self.windowed_layers * min(context, self.window)

    def visible_pairs(self, context: int) -> int:
        """Pairs of a query and a key it sees in a causal prefill of one sequence, over all layers.

        A full layer has ``S (S + 1) / 2``; with a window of W, the first W queries have ``W (W + 1) / 2`` and each of
        the other ``S - W`` has W.
        """
        window = min(context, self.window)
        windowed = window * (window + 1) // 2 + (context - window) * window
        return self.full_layers * (context * (context + 1) // 2) + self.windowed_layers * windowed
