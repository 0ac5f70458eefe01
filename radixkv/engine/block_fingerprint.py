"""A digest of all that the bytes of a pool's blocks depend on: pools with the same one can read each other's blocks."""

from __future__ import annotations

import hashlib
import json

from radixkv.memory import KVPool
from radixkv.model.loader import LoadedModel

# To be changed whenever a pool's blocks become other rows of bytes, or what they hold is computed in another way.
_ROWS_VERSION = 1


def block_fingerprint(loaded: LoadedModel, pool: KVPool) -> bytes:
    """The digest of everything, besides namespace and tokens, that the bytes of a pool's blocks depend on."""
    scales = [pool.scales(layer) for layer in range(len(pool.layers))]
    described: dict[str, object] = {
        "rows": _ROWS_VERSION,
        "model": loaded.fingerprint,
        "rope factors": loaded.rope_factors,
        "compute dtype": str(loaded.dtype),
        "stored dtype": str(pool.dtype),
        "scales": [[None if scale is None else scale.tolist() for scale in pair] for pair in scales],
        "layers": [[shape.num_kv_heads, shape.key_dim, shape.value_dim] for shape in pool.layers],
        "block size": pool.block_size,
    }
    if pool.states is not None:
        described["states"] = [[[shape.dims, str(shape.dtype)] for shape in shapes] for shapes in pool.states.layers]
    return hashlib.blake2b(json.dumps(described, sort_keys=True).encode(), digest_size=32).digest()
