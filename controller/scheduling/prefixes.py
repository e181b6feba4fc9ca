"""The names of a request's prefixes, and how much of it is cached."""

from hashlib import sha256

from ...kvcache.lookup import Hit
from ...kvcache.manager import CacheManager
from ...kvcache.misses import PROMPT_LOGPROBS, Miss
from ...kvcache.prefix import Encoder, TokenChain
from ..request import Request


def named(request: Request, manager: CacheManager) -> tuple[TokenChain, Encoder | None]:
    """The names of its prefixes, computed once, and the images that its text is read beside."""
    encoder = request.gallery.encoder if request.gallery is not None else None
    salt = request.options.salt.encode()
    if encoder is not None and salt:
        encoder = encoder._replace(content=sha256(salt).digest() + encoder.content)
    if request.chain is None:
        request.chain = manager.chain(request.tokens, salt, encoder)
    return request.chain, encoder


def lookup(request: Request, manager: CacheManager) -> Hit:
    """The longest cached prefix of a request. None of it counts while log-probabilities of its prompt are lacking."""
    chain, encoder = named(request, manager)
    hit = request.hit = manager.lookup(chain, encoder=encoder, last=request.hit)
    if not request.lacks_prompt_logprobs or not hit.tokens:
        return hit
    return hit._replace(tokens=0, misses=(*hit.misses, Miss(PROMPT_LOGPROBS, hit.tokens)))
