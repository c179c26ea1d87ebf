"""What a chat template left out of the turns that are learned, counted for the ledger."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.data.spans import TurnSpan


@dataclass
class LeftOut:
    """Learned turns whose reasoning, or whose content beside tool calls, the template does not show."""

    reasoning_turns: int = 0
    content_turns: int = 0
    reasoning_turns_with_place: int = 0
    """Of `reasoning_turns`: the template would show the reasoning if the turn were the last one."""

    def add(self, turn: TurnSpan) -> None:
        """Counts one learned turn."""
        self.reasoning_turns += turn.is_reasoning_dropped
        self.reasoning_turns_with_place += turn.has_reasoning_place
        self.content_turns += turn.is_content_dropped
