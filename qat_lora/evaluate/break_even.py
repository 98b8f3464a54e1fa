"""When a KD cache pays for itself against a teacher that runs live, teacher hours included.

A live teacher runs a forward for every training token of every run; a cache runs one for every token it holds, once,
and later runs and epochs read it for (nearly) nothing. So the cache costs `cache tokens / build rate`, a live teacher
`training tokens / teacher rate`, and the cache is ahead from

    break-even tokens = cache tokens * teacher rate / build rate

on: a single pass where the build runs at the teacher's bare rate, and never where less than one pass is trained. What
this leaves out: the memory that a live teacher takes from the batch (which favours the cache) and the disk that the
cache takes (which does not); and a live teacher gives full logits, a cache its head.
"""

from __future__ import annotations

from typing import Any


def break_even(
    cache_tokens: int, teacher_tokens_per_s: float, build_tokens_per_s: float | None, trained_tokens: dict[str, int]
) -> dict[str, Any]:
    """Return teacher hours of the cache and of live training, and the tokens from which the cache is ahead.

    Args:
        cache_tokens: tokens of the cache's training rows.
        teacher_tokens_per_s: of the teacher's forward.
        build_tokens_per_s: of the cache build; None where nobody knows: the teacher's rate is taken.
        trained_tokens: tokens that each student was trained on, all its epochs counted.
    """
    rate = build_tokens_per_s or teacher_tokens_per_s
    even = cache_tokens * teacher_tokens_per_s / rate
    return {
        "cache_tokens": cache_tokens,
        "teacher_tokens_per_s": teacher_tokens_per_s,
        "build_tokens_per_s": rate,
        "build_rate_assumed": build_tokens_per_s is None,
        "cache_teacher_hours": cache_tokens / rate / 3600,
        "break_even_tokens": even,
        "break_even_passes": even / cache_tokens,
        "students": {
            name: {
                "trained_tokens": tokens,
                "live_teacher_hours": tokens / teacher_tokens_per_s / 3600,
                "cache_is_ahead": tokens > even,
            }
            for name, tokens in trained_tokens.items()
        },
    }


def summary(report: dict[str, Any]) -> list[str]:
    """Return lines for people."""
    assumed = " (assumed: the teacher's bare rate)" if report["build_rate_assumed"] else ""
    lines = [
        f"cache: {report['cache_tokens']:,} tokens, {report['cache_teacher_hours']:.3g} teacher hours at "
        f"{report['build_tokens_per_s']:,.0f} tokens/s{assumed}; ahead of a live teacher from "
        f"{report['break_even_tokens']:,.0f} training tokens on ({report['break_even_passes']:.2f} passes)"
    ]
    for name, of in report["students"].items():
        side = "the cache is ahead" if of["cache_is_ahead"] else "a live teacher would have cost less so far"
        hours = f"{of['live_teacher_hours']:.3g} live teacher hours"
        lines.append(f"{name}: trained on {of['trained_tokens']:,} tokens, {hours}: {side}")
    return lines
