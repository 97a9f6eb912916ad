"""Key/value memory with one slot per running sequence, each at a length of its own, and attention that suits it."""

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "domino_slots"


class SlotMemory:
    """Stands in for a cache while the rows of a batch decode, one token each per step, at different lengths.

    A finished row's slot takes the next sequence (`fill`), so the batch never shrinks. Keys are stored transposed: a
    step's scores are then one plain product.

    Args:
        num_slots: B. capacity: the longest sequence in tokens.
    """

    is_compileable = False

    def __init__(self, num_slots: int, capacity: int):
        self.num_slots = num_slots
        self.capacity = capacity
        self.lengths = torch.zeros(num_slots, dtype=torch.long)
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def fill(self, slots: list[int], layers: list[tuple[torch.Tensor, torch.Tensor]], lengths: list[int]) -> None:
        """Puts prefilled sequences into slots.

        Args:
            layers: per layer, keys and values `[n, heads, S, head_dim]` of the n sequences, padded on the right.
            lengths: of the n sequences.
        """
        if not self._keys:
            # CPUs run a step's many small products far more slowly in half precision than in float32.
            first = layers[0][0]
            dtype = torch.promote_types(first.dtype, torch.float32) if first.device.type == "cpu" else first.dtype
            for keys, values in layers:
                heads, dim = keys.shape[1], keys.shape[3]
                self._keys.append(keys.new_zeros(self.num_slots, heads, dim, self.capacity, dtype=dtype))
                shape = (self.num_slots, heads, self.capacity, values.shape[3])
                self._values.append(values.new_zeros(shape, dtype=dtype))
        longest = max(lengths)
        for i, (keys, values) in enumerate(layers):
            self._keys[i][slots, :, :, :longest] = keys[:, :, :longest].transpose(2, 3).to(self._keys[i].dtype)
            self._values[i][slots, :, :longest] = values[:, :, :longest].to(self._values[i].dtype)
        self.lengths[slots] = torch.tensor(lengths)

    def advance(self) -> None:
        """Counts the token that every row has just decoded. Free rows are held at the start of their slot."""
        self.lengths = (self.lengths + 1).clamp_max(self.capacity - 1)

    def release(self, slot: int) -> None:
        """A free row goes on decoding nothing of use; kept short, it costs no columns."""
        self.lengths[slot] = 0

    def mask(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Additive mask `[B, 1, 1, longest + 1]`: each row sees its own tokens and the one it decodes."""
        lengths = self.lengths.to(device)
        columns = torch.arange(int(self.lengths.max()) + 1, device=device)
        hidden = columns > lengths[:, None]
        return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, torch.finfo(dtype).min)[
            :, None, None
        ]

    # What a model asks of a cache.
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self.lengths.max())

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args, **kwargs):
        rows, at = torch.arange(self.num_slots, device=keys.device), self.lengths.to(keys.device)
        self._keys[layer_idx][rows, :, :, at] = keys[:, :, 0].to(self._keys[layer_idx].dtype)
        self._values[layer_idx][rows, :, at] = values[:, :, 0].to(self._values[layer_idx].dtype)
        end = int(self.lengths.max()) + 1
        return self._keys[layer_idx][..., :end].transpose(2, 3), self._values[layer_idx][:, :, :end]


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """One query per row: the query heads of a group become queries of their key/value head, and nothing is repeated.
    In the dtype of keys and values, which the memory chooses.

    Everything else (prefills) goes to sdpa.
    """
    plain = kwargs.get("softcap") is None and kwargs.get("s_aux") is None
    if query.shape[2] != 1 or attention_mask is None or not plain:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    batch, heads, _, dim = query.shape
    grouped = query.to(key.dtype).reshape(batch, key.shape[1], heads // key.shape[1], dim)
    scores = torch.matmul(grouped, key.transpose(2, 3)) * (dim**-0.5 if scaling is None else scaling)
    weights = torch.softmax(scores + attention_mask, dim=-1, dtype=torch.float32).to(value.dtype)
    return torch.matmul(weights, value).reshape(batch, 1, heads, -1).to(query.dtype), None


AttentionInterface.register(ATTENTION, slot_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
