"""Three datasets of reasoning-gym in one task: `groupwise train gym_mix.py --model …`."""

import groupwise as gw

easy = {
    "chain_sum": {"max_terms": 3, "max_digits": 2},
    "spell_backward": {"max_word_len": 5},
    "count_bits": {"max_n": 100},
}
task = gw.reasoning_gym_task(",".join(easy), config=easy)
if __name__ == "__main__":
    gw.train(task, rollout={"curriculum": 2})
