"""`alignment data augment`: rows that a file does not have yet, and how hard its prompts are for a model.

    adversarial   copies of rows with an injected attack in the prompt; the true task keeps its answer
    expand        new prompts that ask what a row asks, inside the row's own cluster of meanings
    grade         the success rate of a model's own answers, as the difficulty that datamodules.PromptData mixes by

Part of the command line, which alone imports it: so it may use `datamodules`, whose readers decide what a row means.
"""
