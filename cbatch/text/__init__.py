"""Everything above token ids: tokenizers, incremental decoding, stop strings, chat messages and
templates, and the formats of thoughts and tool calls.

Imports nothing of the engine, so a client process can use it alone.
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
