#!/usr/bin/env python3
"""Writes small tokenizers in the styles of well-known models, and the results of the Hugging Face
library on difficult texts.

    tools/tokenizer_golden.py [DIR]   rewrites DIR (default tests/golden/data/tokenizers)

DIR/texts.json is a list of texts.
DIR/STYLE/tokenizer.json has a vocabulary trained on Genesis, as the program `bible` prints it, and
on a few lines in other scripts.
DIR/STYLE/expected.json has the ids of each text, and the text to which these decode.
DIR/characters.json has for some styles a hash of the ids of every character, with 4096 characters
per hash.
Needs the package tokenizers. The same version writes the same bytes.
"""

import json
import subprocess
import sys
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

DATA = Path(__file__).resolve().parent.parent / "tests" / "golden" / "data" / "tokenizers"
MARKER = "\u2581"

# -- texts -----------------------------------------------------------------------------------------------

OTHER_SCRIPTS = [
    "def f(x):\n    return [i ** 2 for i in range(10)]  # squares\n", "\u4f60\u597d\uff0c\u4e16\u754c\u3002" * 3,
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8" * 3, "caf\u00e9 na\u00efve \u00fcber " * 3, "2024-01-15 3.14159 100,000 " * 3,
]

TEXTS = [
    "", "a", " ", "  ", "   x", "\n", "\r\n\r\n", "\t \n x", "Hello, world!", "In the beginning God created the heaven",
    "I'm you're HE'LL it'S 'tis \u017f 's'", "  leading and trailing   ", "don't DON'T can\u2019t",
    "a\u00a0b\u2003c\u180ed\ufeffe\u3000f", "12345678901234 3.14159 \u0661\u0662\u0663 \u216b \u00bd \u00b2",
    # composed and decomposed, compatibility forms, marks out of order, marks only
    "\u00e9 e\u0301 \u1e9b\u0323 \ufb01 \u2460 \u00c5 \u212b", "\u0301\u0301\u0323a\u0301\u0323", "\uac01 \u1100\u1161\u11a8",
    "\u0130STANBUL \u0131i \u1e9e \u03a3\u03c2", "\ufdfa \u337f",
    # emoji, joined and with a skin tone
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f3f3\ufe0f\u200d\U0001f308 \U0001f44d\U0001f3fd",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u65e5\u672c\u8a9e\u30c6\u30ad\u30b9\u30c8 \ud55c\uad6d\uc5b4",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0e44\u0e17\u0e22 \u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u05e2\u05d1\u05e8",
    "\U0001d400\U0010ffff\ue000", "\u0000\u0001\u007f\u001b[0m", "\u200b\u200d\u2060", "\u3400\U00020000", "a\u0345b",
    "\ua66e \u1fb3 \u01c5 \u02b0", "$100 + 5% = ^_^ `~` |", "mixedCaseHTTPServer fooBAR", "def f(x):\n    return x**2  # no\n\n\n",
    "https://example.com/a?b=c&d=e#f", "a" * 53, "ab" * 200, " " * 40 + "x", "\n\n\n\n a\n\n",
    # added tokens: by themselves, inside words, beside spaces, spelled almost right
    "<|endoftext|>", "x<|endoftext|>y", "<|im_start|>user\nhi<|im_end|>", "<|im_start|", "a <think>  b</think>",
    " <think> <think>", "caf\u00e9 cafe\u0301 CAF\u00c9", "word sword word, words", "<s> </s> <unk> <s>hi", "<0x41> <0xFF>",
    MARKER + "a " + MARKER * 2 + " b" + MARKER + "c", "<|begin_of_text|>hi<|eot_id|>", "<sep>x <sep> y",
]

# -- styles ----------------------------------------------------------------------------------------------

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")
DEEPSEEK3 = [
    r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
]
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{SUFFIX}"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def special(*contents):
    return [AddedToken(content, special=True, normalized=False) for content in contents]


def train(tokenizer, corpus, tokens=(), alphabet=(), merges=250):
    size = len(tokens) + len(set("".join(corpus)) | set(alphabet)) + merges
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False, special_tokens=list(tokens),
                                  initial_alphabet=list(alphabet), limit_alphabet=300)
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def begin_with(tokenizer, token):
    return processors.TemplateProcessing(single=f"{token} $A", pair=f"{token} $A {token} $B",
                                         special_tokens=[(token, tokenizer.token_to_id(token))])


def byte_level(corpus, splits=(), tokens=(), ignore_merges=False):
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    stages = [pre_tokenizers.Split(Regex(split), "isolated") for split in splits]
    stages.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splits))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(stages) if splits else stages[0]
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return train(tokenizer, corpus, tokens, pre_tokenizers.ByteLevel.alphabet())


def gpt2(corpus):
    return byte_level(corpus, tokens=[AddedToken("<|endoftext|>", special=True, normalized=True)])


def llama3(corpus):
    tokenizer = byte_level(corpus, [LLAMA3], ignore_merges=True)
    tokenizer.add_special_tokens(special("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"))
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=True), begin_with(tokenizer, "<|begin_of_text|>")])
    return tokenizer


def qwen2(corpus):
    tokenizer = byte_level(corpus, [QWEN2])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(special("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    tokenizer.add_tokens([AddedToken("<think>", normalized=False, lstrip=True, rstrip=True),
                          AddedToken("cafe\u0301", normalized=True), AddedToken("word", single_word=True)])
    return tokenizer


def deepseek3(corpus):
    tokenizer = byte_level(corpus, DEEPSEEK3)
    tokenizer.add_special_tokens(special("<s>", "</s>"))
    tokenizer.post_processor = begin_with(tokenizer, "<s>")
    return tokenizer


def o200k(corpus):
    return byte_level(corpus, [O200K], special("<|endoftext|>"))


def sentencepiece(corpus, normalizer):
    """Trains on words and lays the vocabulary out like SentencePiece: unknown, begin, end, 256 bytes,
    tokens. There is no pre-tokenizer.
    """
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    content = json.loads(train(tokenizer, corpus).to_str())
    learnt = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + learnt
    content["model"]["vocab"] = {token: index for index, token in enumerate(tokens)}
    content["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens(special("<unk>", "<s>", "</s>"))
    tokenizer.post_processor = begin_with(tokenizer, "<s>")
    return tokenizer


def llama2(corpus):
    tokenizer = sentencepiece(corpus, normalizers.Sequence([normalizers.Prepend(MARKER), normalizers.Replace(" ", MARKER)]))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(MARKER, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer


def gemma(corpus):
    tokenizer = sentencepiece(corpus, normalizers.Replace(" ", MARKER))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(MARKER, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("\n", "\n\n", MARKER * 2, MARKER * 3)])
    return tokenizer


def metaspace(corpus):
    """Unknown characters are not fused, and only the first word has a marker."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.NFKD()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.Metaspace(prepend_scheme="first")])
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    train(tokenizer, corpus[:-4], ["<unk>"])
    tokenizer.add_special_tokens(["<sep>"])
    return tokenizer


def words(corpus):
    """Has all features at once that no well-known model uses."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Punctuation("contiguous"),
         pre_tokenizers.Split(Regex("[aeiou]"), "merged_with_previous"), pre_tokenizers.Split("x", "removed")])
    return train(tokenizer, corpus[:-4], ["<unk>"])


def pieces(corpus):
    """Lower case, and a space before each word. Its ids show how every character is split."""
    tokenizer = byte_level(corpus)
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Punctuation(),
         pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)])
    return tokenizer


STYLES = [gpt2, llama3, qwen2, deepseek3, o200k, llama2, gemma, metaspace, words, pieces]
# The neighbours of a character whose class matters. "'t" is a token of its own only after a letter.
CONTEXTS = {"gpt2": ["a", "'t 1"], "llama3": ["a", "'LL1 "], "deepseek3": ["!", "the "], "o200k": ["A", "'s 1"], "pieces": ["a", "1 "]}
BLOCK, LINE = 4096, 64

# -- writing ---------------------------------------------------------------------------------------------


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, separators=(",", ":")) + "\n")


def expectation(tokenizer):
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    return {"made_by": f"tools/tokenizer_golden.py, tokenizers {tokenizers.__version__}", "ids": ids,
            "decoded": [tokenizer.decode(each) for each in ids]}


def hash_of(ids):
    """FNV-1a, one id per step."""
    value = 0xCBF29CE484222325
    for each in ids:
        value = (value ^ each) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{value:016x}"


def block_text(first, before, after):
    characters = (chr(c) for c in range(first, first + LINE) if not 0xD800 <= c < 0xE000)
    return "".join(before + c + after for c in characters)


def character_hashes(tokenizer, before, after):
    tokenizer.post_processor = None
    blocks = [[block_text(line, before, after) for line in range(first, first + BLOCK, LINE)]
              for first in range(0, 0x110000, BLOCK)]
    return [hash_of(i for each in tokenizer.encode_batch_fast(lines, add_special_tokens=False) for i in each.ids)
            for lines in blocks]


def main():
    data = Path(sys.argv[1]) if len(sys.argv) > 1 else DATA
    genesis = subprocess.run(["bible", "-f", "Gen1:1-Gen9:29"], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                             check=True).stdout
    write(data / "texts.json", TEXTS)
    characters = {}
    for style in STYLES:
        tokenizer = style(genesis.split("\n") + OTHER_SCRIPTS)
        write(data / style.__name__ / "tokenizer.json", json.loads(tokenizer.to_str()))
        write(data / style.__name__ / "expected.json", expectation(tokenizer))
        if style.__name__ in CONTEXTS:
            before, after = CONTEXTS[style.__name__]
            hashes = character_hashes(tokenizer, before, after)
            characters[style.__name__] = {"before": before, "after": after, "hashes": hashes}
        print(f"{style.__name__}: {tokenizer.get_vocab_size()} tokens")
    write(data / "characters.json", characters)


if __name__ == "__main__":
    main()
