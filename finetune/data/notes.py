"""What a chat template left out of a conversation without making it unusable, counted for the ledger."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.data.spans import TurnSpan


@dataclass
class LeftOut:
    """Learned turns of which the template does not show the reasoning, the content beside tool calls, or white space at
    the ends of the content; and whether it shows the tools that are defined."""

    reasoning_turns: int = 0
    content_turns: int = 0
    trimmed_turns: int = 0
    hides_tools: bool = False
    """Tools are defined, and the template does not show them; none is called."""
    reasoning_turns_with_place: int = 0
    """Of `reasoning_turns`: the template would show the reasoning if the turn were the last one."""

    def add(self, turn: TurnSpan) -> None:
        """Counts one learned turn."""
        self.reasoning_turns += turn.is_reasoning_dropped
        self.reasoning_turns_with_place += turn.has_reasoning_place
        self.content_turns += turn.is_content_dropped
        self.trimmed_turns += turn.is_trimmed
