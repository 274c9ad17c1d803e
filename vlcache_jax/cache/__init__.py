"""What the same image means, and what is kept for it.

Pictures and contexts come in as digests (`keys`), computed K, V and encoder rows as device arrays (`writer`); records
come out (`record`), pinned for as long as they are used. The `Store` owns all state and makes all decisions, tiers only
keep things, and the `Writer` fills records when the answer no longer waits. Nothing here knows of layouts, plans,
models or programs.

An image is its pixels. Its *content key* digests the decoded RGB picture, all of it, with its height and width; two
files that decode to the same pixels are one image, and a change of one pixel makes another. Decoding takes longer than
hashing a file, so an *alias key*, which digests the encoded bytes, leads to the content key of files seen before: a hit
needs no decoding. A path, a name or a URL never identifies anything, because what lies there can change.

What is kept for an image also depends on how it was made. The *entry key* of a record digests the content key together
with the image processor's settings (the pixel limits included), the model and its weights, the dtype or codec of the
stored values, and the version of the record format. A change in any of these looks up another record; nothing is ever
converted or compared approximately.

A *salt*, when a caller gives one, is part of alias and entry keys: callers with different salts share nothing and
cannot learn from a hit what others have sent. Entry keys are told in reports, so that knowing one proves nothing: each
record names its *owner*, a digest of the salt (the salt itself is kept nowhere), and who asks for an entry key under
another salt is answered as if nobody knew it.

Every key is a whole BLAKE3 digest over length-framed, typed parts, so no two lists of parts digest the same bytes. Two
files of one key are as hard to find as by SHA-256, and where a processor has no instructions for that, files take a
fifth of the time and pixels a tenth (docs/research/cpu_notes.md); a hit does little else with their bytes.

Two kinds of *records* are kept (`record.py`): encoder rows, which are right in every context, and K, V of all layers,
which belong to the context they were computed in; of these there are as many variants an image as the budget holds, or
as the user allows. The least recently used records leave first. Those that a user pins stay, up to a share of the
budget. Why K, V are gone is remembered for a while, for each context and for the image as a whole.

K, V may be kept by a codec (`CacheConfig.codec`). Such records serve approximate reuse alone.

What comes from outside memory is checked against its checksums before anyone uses it. A record that is damaged, or
cannot be read, is a miss with a reason, never an error.
"""
