"""A training loop of one's own: the built-in model learns Countdown. `python custom_loop.py`"""

import sys

import groupwise as gw


def main(steps: int = 20, batch_size: int = 24) -> gw.Agent:
    env = gw.PromptEnv("countdown", batch_size=batch_size)
    agent = gw.Agent(model="tiny", group_size=16, max_tokens=112)
    print(f"before: mean reward {agent.test(env):.3f} on held-out prompts")
    prompts, _ = env.reset(seed=0)
    for step in range(1, steps + 1):
        answers = agent.get_action(prompts)
        prompts, rewards, *_ = env.step(answers)
        loss, kl = agent.learn((answers, rewards))
        print(f"step {step}: reward {rewards.mean():.3f} · loss {loss:+.4f} · KL {kl:.4f}")
        if step % 10 == 0:
            print(f"held-out: mean reward {agent.test(env):.3f}")
    agent.save("agent")
    return agent


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
