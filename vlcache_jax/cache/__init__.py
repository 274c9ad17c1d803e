"""Image cache: identity of images, and storage of their encoder output and KV.

Images and contexts come in as digests (`keys`), computed KV and encoder output as device arrays (`writer`). Cache
entries (`record`) come out, pinned while they are used. The `Store` owns all state and makes all decisions. Tiers only
store data. The `Writer` fills cache entries off the critical path. This package does not depend on layouts, plans,
models or programs.

An image is identified by its pixels. Its *content key* digests the decoded RGB image with its height and width. Two
files that decode to the same pixels are one image; one changed pixel makes another image. Decoding takes longer than
hashing a file. Therefore an *alias key*, the digest of the encoded bytes, maps to the content key of known files, and a
hit needs no decoding. Paths, names and URLs never identify an image, because their content can change.

Cached data also depend on how they were computed. The *entry key* digests the content key, the settings of the image
processor (including pixel limits), the model with its weights, the dtype or codec of the stored values, and the format
version. A change in any of these leads to another cache entry. Nothing is converted.

A *salt* from the caller is part of alias and entry keys. Callers with different salts share nothing, and a hit does not
reveal what others have sent. Entry keys appear in reports, so knowing one proves nothing. Each cache entry has an
*owner*, a digest of the salt. The salt itself is not stored. Requests for an entry key under another salt get the same
response as for an unknown key.

Every key is a full BLAKE3 digest over length-framed, typed parts, so that different lists of parts never digest the
same bytes. Collisions are as hard to find as for SHA-256. On processors without SHA instructions, files take a fifth of
the time and pixels a tenth (docs/research/cpu_notes.md). Hashing is most of the work of a hit.

There are two kinds of cache entries (`record.py`). Encoder output is valid in every context. KV of all layers belongs
to the context in which it was computed. An image has as many KV variants as fit the budget or the configured limit. The
least recently used entries are evicted first. Entries that users pin stay, up to a fraction of the budget. The reason
why KV was lost is remembered for a while, for each context and for the image.

KV may be stored by a codec (`CacheConfig.codec`). Such entries serve only approximate reuse.

Data from outside host memory are verified against checksums before use. A damaged or unreadable entry is a miss with a
reason, never an error.
"""
