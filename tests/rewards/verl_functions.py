"""Reward functions as users of verl write them for `custom_reward_function`. Workers load this file by its path."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """One file for several data sources."""
    if data_source == "openai/gsm8k":
        found = re.findall(r"#### (-?[0-9.,]+)", solution_str)
        answer = found[-1].replace(",", "") if found else None
        return {
            "score": float(answer == ground_truth),
            "acc": answer == ground_truth,
            "pred": answer,
            "found": len(found),
        }
    if data_source == "index":
        return float(extra_info["index"])
    raise NotImplementedError(f"no reward for {data_source}")


def with_settings(data_source, solution_str, ground_truth, extra_info, method="strict", format_score=0.0, **kwargs):
    assert not kwargs, kwargs
    assert extra_info == {} and isinstance(format_score, float)
    if solution_str == ground_truth:
        return 1.0
    return format_score if method == "strict" else 0.5


async def waits(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return len(solution_str) + len(ground_truth)


def batch(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    assert not kwargs, kwargs
    rows = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
    return [{"score": float(text == truth), "index": info.get("index")} for _, text, truth, info in rows]
