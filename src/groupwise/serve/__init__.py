"""An OpenAI-compatible server on groupwise's own engine, and chat sessions in the terminal.

Modules in reading order:

    openai_server        routes, the path of a request through the engine, metrics, the front-end process
    http_server          the subset of HTTP/1.1 that an API needs
    completion_request   parse and validate requests: messages, tools, sampling settings
    structured_output    the grammar that an answer must match: response_format, forced and strict tool calls
    completion_response  build responses, complete or streamed
    responses_api        the same for OpenAI's Responses API, on top of chats
    detokenizer          incremental detokenization, and tokens as shown with log-probabilities
    ipc                  messages between the front-end process and the engine process
    agent_endpoint       the endpoint that answers agents while training runs
    chat_session         a chat in the current process, with or without tools
"""
