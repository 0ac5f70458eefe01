"""The cache without a model: token ids in, block ids out. For your own engine, router or simulator."""

from radixkv.cache import OutOfBlocks, PrefixCache

cache = PrefixCache(num_blocks=8, block_size=4)

first = cache.open([1, 2, 3, 4, 5, 6])
cache.reserve(first, 6)  # blocks for all six tokens
cache.append(first, [1, 2, 3, 4, 5, 6])  # their keys and values are written
cache.close(first)  # the blocks stay cached

second = cache.open([1, 2, 3, 4, 5, 9, 9])
print("cached:", second.num_cached_tokens, "tokens; blocks:", second.block_ids)
print("to be copied before anything is written:", cache.drain_copies())

try:
    cache.reserve(second, 100)
except OutOfBlocks as error:
    print("refused, and nothing changed:", error)
cache.abort(second)
cache.check()
