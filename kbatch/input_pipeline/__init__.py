"""Does the input pipeline or the train step limit training?"""
