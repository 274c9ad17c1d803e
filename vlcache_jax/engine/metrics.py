"""How long a request took, step by step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Metrics:
    """Seconds. Steps that several requests share count in full for each of them; steps of the device are told by when
    their results were ready, as nobody waits for them.

    What is done once for several requests of a call, such as decoding an image, counts for the first of them.

    Attributes:
      lookup, decode_image, preprocess: until the images were identified, that is, until the request arrived.
      queue: from arrival until it got pages.
      transfer, link, encode, prefill: on the device, of the steps that computed the prompt.
      first_token: the rest of the time to the first token: the output head, sampling, and waiting between steps.
      compress: on the device, to find out what the answer goes on with, and to compact it.
      decode: from the first token to the last.
      inter_token: from one delivery of tokens to the next; those of a window come together.
      launched: from the call until the first of its programs had been handed to the device, by the clock; all that was
        done before for other rows of the call is in it.
      ttft: from the beginning to the first token, by the clock.
      e2e: from the beginning to the end, by the clock.
      wave: number of the step of the engine's loop that admitted it.
    """

    lookup: float = 0.0
    decode_image: float = 0.0
    preprocess: float = 0.0
    queue: float = 0.0
    encode: float = 0.0
    transfer: float = 0.0
    link: float = 0.0
    prefill: float = 0.0
    first_token: float = 0.0
    compress: float = 0.0
    decode: float = 0.0
    inter_token: tuple[float, ...] = ()
    launched: float = 0.0
    ttft: float = 0.0
    e2e: float = 0.0
    wave: int = 0

    @property
    def identified(self) -> float:
        """Seconds before the request arrived."""
        return self.lookup + self.decode_image + self.preprocess
