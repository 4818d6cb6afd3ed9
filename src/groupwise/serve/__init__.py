"""An OpenAI-compatible server on our own engine, and chat in the terminal.

Modules in reading order:

    openai_server        requests in, jobs for the engine, responses out
    http_server          the part of HTTP/1.1 that an API needs
    completion_request   a request: messages, tools and sampling settings, checked
    completion_response  a response, whole or streamed
    detokenizer          tokens → text, one token at a time
    frontend             the process that talks to clients
    ipc                  messages between that process and the engine's
    load_target          load what the user named
    chat_session         a conversation in this process, with and without tools
"""
