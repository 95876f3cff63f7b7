"""What stands around the words of a dialogue: token ids cut out of a tokenizer's chat template, whatever its form."""

from __future__ import annotations

from dataclasses import dataclass

from jaxspec.config import ConfigError, ModelConfig, check_ids

OPENERS = (
    "Write a short story about",
    "Write an email to",
    "Write a poem about",
    "Give me a list of",
    "What is the difference between",
    "Explain how",
    "Explain why",
    "How do I",
    "How can I",
    "What are the main",
    "Why do",
    "Describe",
    "Summarize the following",
    "Compare",
    "Can you help me",
    "I want to",
    "Imagine you are",
    "Pretend that you are",
    "Suggest",
    "Create a plan for",
    "Translate",
    "Rewrite the following",
    "Correct the grammar in",
    "Classify the following",
    "Extract the names of",
    "Who was",
    "When did",
    "Where is",
    "Which of these",
    "Is it true that",
    "Tell me about",
    "Outline",
    "Analyze",
    "Argue for",
    "Write a Python function",
    "Write a Python program that",
    "Complete this Python function:\n```python\ndef ",
    "```python\ndef ",
    "from typing import List\n\n\ndef ",
    "def ",
    "Implement a function in C++ that",
    "Write a SQL query",
    "Write an HTML page",
    "What does this code do?\n```",
    "Fix the bug in this code:\n```python\n",
    "Write a class",
    "Solve the equation",
    "Calculate",
    "A farmer has",
    "A train travels",
    "A shop sells",
    "There are",
    "If a box holds",
    "Anna has",
    "Tom buys",
    "In a class of",
    "What is the sum of",
    "How many",
    "How much",
    "Find the area of",
    "The price of",
    "What is the probability",
    "Prove that",
    "Simplify",
    "Given the numbers",
)
"""How some of the users begin: a model left alone rarely asks for code or arithmetic."""


@dataclass(frozen=True)
class Script:
    """Token ids around the words of a dialogue.

    Attributes:
      prefix: before the first user's words.
      middle: from the end of the user's words to the answer; its first token is the one that ends the user's turn.
      close: from the end of an answer to the next user's words; its first token ends the answer.
      ends: tokens at which an answer ends.
      dialogue: False for a model without a chat template: all is one text, which counts as an answer.
    """

    prefix: tuple[int, ...]
    middle: tuple[int, ...]
    close: tuple[int, ...]
    ends: tuple[int, ...]
    dialogue: bool


def script_of(tokenizer, config: ModelConfig) -> Script:
    """The script of a tokenizer's chat template; that of plain text where there is none (or no tokenizer at all).

    Raises:
      ConfigError: the template does not show the words that it is given, one after another, or it has ids beyond the
        vocabulary.
    """
    stops = tuple(config.stop_token_ids)
    if tokenizer is None or not tokenizer.has_chat_template:
        start = tuple(tokenizer.encode("")) if tokenizer is not None else ()
        check_ids(start, config.vocab_size, "what the tokenizer puts in front of a text")
        return Script(start, (), start[:1] or stops[:1] or (0,), stops, False)
    first, answer, second = "jaxspecfirst", "jaxspecanswer", "jaxspecsecond"
    user, reply = {"role": "user", "content": first}, {"role": "assistant", "content": answer}
    opening = tokenizer.render_chat([user], add_generation_prompt=True)
    longer = tokenizer.render_chat([user, reply, {"role": "user", "content": second}], add_generation_prompt=True)
    pieces = opening.split(first)
    between = longer.partition(answer)[2].partition(second)
    if len(pieces) != 2 or not between[1]:
        raise ConfigError(
            "the chat template does not show a user's words, the answer and the next user's words one after another, so no "
            "dialogues can be synthesised with it: pass prompts that end where an answer begins (--prompts)"
        )
    prefix, middle, close = (
        tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (pieces[0], pieces[1], between[0])
    )
    check_ids(prefix + middle + close, config.vocab_size, "what the chat template puts between turns")
    if not middle or not close:
        raise ConfigError("the chat template puts nothing between turns: no dialogues can be synthesised with it")
    return Script(prefix, middle, close, tuple(dict.fromkeys((close[0], *stops))), True)
