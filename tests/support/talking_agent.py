"""A task whose agent owns its loop: two turns that continue, one question apart, and one rewritten turn."""

CHATS = """
import json, urllib.request, zlib
import groupwise as gw

def chat(base_url, api_key, messages):
    body = json.dumps({"model": "any", "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(base_url + "/chat/completions", data=body, headers=headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

def talk(example, base_url, api_key):
    messages = [{"role": "user", "content": f"{example['n']} + 1"}]
    for _ in range(2):
        answer = chat(base_url, api_key, messages)
        messages += [answer, {"role": "user", "content": "Again."}]
    if example["n"] == 5:
        raise ValueError("no luck with 5")
    chat(base_url, api_key, [{"role": "user", "content": "Sum up: " + answer["content"]}])
    return chat(base_url, api_key, [messages[0], {**answer, "content": "no"}, messages[2]])["content"]

def luck(rollout, example):
    return float(zlib.crc32(rollout.text.encode()) % 4 == 0)

task = gw.Task(name="talk", examples=[{"n": n} for n in range(24)], agent=talk, rewards=[luck])
"""
