"""Measuring a model: tasks that are named in YAML, results in the terminal, in a file and in MLflow.

base           what a task gets and gives; intervals
likelihood     Perplexity, MultipleChoice, PreferenceAccuracy: log-probs, nothing is sampled
replies        Replies (any rewards on sampled replies), Diversity
safety         Safety: harmful replies and refusals
wins           PassAtK, WinRate
conversations  MTBench: several turns (talks), graded or compared by a judge
published      the judge prompts that MT-Bench was published with
harness        LmEval: tasks of lm-eval
record         tables, the file, and the MLflow run they belong to
"""
