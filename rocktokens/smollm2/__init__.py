"""The real pair: SmolLM2-135M taught a task, and a shortened SmolLM2-135M that learns from it. Nothing is planted.

    pair = make_pair(packaged_weights(), cache_directory())     # rocktokens.smollm2.make: once, an hour or so
    pair.student, pair.teacher, pair.prompts                    # two model directories and a .jsonl file

problems.py writes word problems, weights.py turns GGUF into a Llama and leaves out layers, teach.py trains the teacher,
make.py does it all in order, resumably, and recipe.py holds the settings of `rocktokens study smollm2`. Importing this
loads nothing.
"""
