"""Text above, token ids below: tokenizers, incremental decoding and stop strings.

Imports nothing of the engine's, so that a client process can hold it alone.
"""

from cbatch.text.chat import ChatTemplate, ChatTemplateError, load_chat_template
from cbatch.text.detokenizer import StopMatcher, TextDelta, TextStream
from cbatch.text.tokenizer import TextTokenizer, TokenizerError, load_tokenizer

__all__ = [
    "ChatTemplate",
    "ChatTemplateError",
    "StopMatcher",
    "TextDelta",
    "TextStream",
    "TextTokenizer",
    "TokenizerError",
    "load_chat_template",
    "load_tokenizer",
]
