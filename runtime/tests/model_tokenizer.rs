//! The tokenizer on a tiny vocabulary, and on SmolLM2's against golden token ids.

mod model_support;

use std::sync::LazyLock;

use forebay::model::{Gguf, Model, Tokenizer};
use model_support::tiny_model::{Meta, TinyArch, TinyModel, tiny_model};
use model_support::{golden_qwen, golden_smollm2, ids, qwen, smollm2};
use proptest::prelude::*;

fn tiny(change: impl FnOnce(&mut model_support::tiny_model::GgufWriter)) -> Gguf {
    let mut file = tiny_model(&TinyModel { layers: 1, ..TinyModel::default() });
    change(&mut file);
    Gguf::from_bytes("tiny.gguf".as_ref(), file.finish()).unwrap()
}

fn tiny_tokenizer(arch: TinyArch) -> Tokenizer {
    let file = tiny_model(&TinyModel { layers: 1, arch, ..TinyModel::default() });
    Tokenizer::from_gguf(&Gguf::from_bytes("tiny.gguf".as_ref(), file.finish()).unwrap()).unwrap()
}

#[test]
fn hard_strings_have_the_golden_tokens() {
    let Some(model) = smollm2() else { return };
    let tokenizer = golden_tokens(model, &golden_smollm2());
    assert_eq!((tokenizer.bos(), tokenizer.eos(), tokenizer.eot()), (Some(1), Some(2), Some(2)));
    assert!(!tokenizer.adds_bos() && tokenizer.vocab_size() == 49_152);
    // End of text and end of turn; begin of turn is not an end.
    assert_eq!([0, 1, 2, 17].map(|token| tokenizer.is_end_of_generation(token)), [true, false, true, false]);
}

#[test]
fn hard_strings_have_the_golden_tokens_of_qwen2() {
    let Some(model) = qwen() else { return };
    let tokenizer = golden_tokens(model, &golden_qwen());
    assert!(!tokenizer.adds_bos() && tokenizer.vocab_size() == 151_936);
    let ends = tokenizer.encode("<|im_end|><|endoftext|><|im_start|>", true).unwrap();
    assert_eq!(ends.iter().map(|&t| tokenizer.is_end_of_generation(t)).collect::<Vec<_>>(), [true, true, false]);
}

fn golden_tokens(model: &Model, golden: &serde_json::Value) -> Tokenizer {
    let tokenizer = Tokenizer::from_gguf(model.gguf()).unwrap();
    let cases = golden["tokenize"].as_array().unwrap();
    assert!(cases.len() >= 27);
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let tokens = tokenizer.encode(text, true).unwrap();
        assert_eq!(tokens, ids(&case["ids"]), "{text:?}");
        assert_eq!(tokenizer.decode(&tokens, false), text);
    }
    for case in golden["greedy"].as_array().unwrap() {
        assert_eq!(tokenizer.encode(case["prompt"].as_str().unwrap(), false).unwrap(), ids(&case["prompt_ids"]));
    }
    let text = golden["logits"]["text"].as_str().unwrap();
    assert_eq!(tokenizer.encode(text, false).unwrap(), ids(&golden["logits"]["ids"]));
    tokenizer
}

#[test]
fn special_tokens_are_text_unless_asked_for() {
    for arch in [TinyArch::Llama, TinyArch::Qwen2] {
        let tokenizer = tiny_tokenizer(arch);
        let text = "the<|im_start|>user<|im_end|><|im_end";
        let parsed = tokenizer.encode(text, true).unwrap();
        assert_eq!(parsed.iter().filter(|token| **token < 3).copied().collect::<Vec<_>>(), [1, 2]);
        let plain = tokenizer.encode(text, false).unwrap();
        assert!(plain.iter().all(|token| *token >= 3));
        assert_eq!(tokenizer.decode(&parsed, false), text);
        assert_eq!(tokenizer.decode(&parsed, true), "theuser<|im_end");
        assert_eq!(tokenizer.decode(&plain, true), text);
        assert!(tokenizer.is_control(1) && !tokenizer.is_control(3) && !tokenizer.is_control(u32::MAX));
    }
}

#[test]
fn of_two_special_tokens_the_longer_wins() {
    let gguf = tiny(|file| {
        let mut tokens = model_support::tiny_model::tokens();
        let mut kinds = vec![1; tokens.len()];
        kinds[..3].fill(3);
        tokens.extend(["<a>".to_string(), "<a>b".to_string()]);
        kinds.extend([3, 4]);
        file.set("llama.vocab_size", Meta::U32(tokens.len() as u32));
        file.set("tokenizer.ggml.tokens", Meta::Texts(tokens));
        file.set("tokenizer.ggml.token_type", Meta::I32s(kinds));
    });
    let tokenizer = Tokenizer::from_gguf(&gguf).unwrap();
    let last = tokenizer.vocab_size() as u32 - 1;
    assert_eq!(tokenizer.encode("<a>b<a>", true).unwrap(), [last, last - 1]);
    // A user-defined token is text when it is decoded; a control token is not.
    assert_eq!(tokenizer.decode(&[last, last - 1], true), "<a>b");
}

#[test]
fn a_begin_of_text_token_is_added_where_the_model_wants_one() {
    let without = tiny_tokenizer(TinyArch::Llama);
    let with = Tokenizer::from_gguf(&tiny(|file| file.set("tokenizer.ggml.add_bos_token", Meta::Bool(true)))).unwrap();
    let plain = without.encode("the", false).unwrap();
    assert_eq!(without.encode_with_bos("the", false).unwrap(), plain);
    assert_eq!(with.encode("the", false).unwrap(), plain);
    assert_eq!(with.encode_with_bos("the", false).unwrap(), [&[0][..], &plain].concat());
    assert_eq!(with.encode_with_bos("<|endoftext|>the", true).unwrap(), [&[0][..], &plain].concat());
}

#[test]
fn streams_give_whole_characters() {
    let tokenizer = tiny_tokenizer(TinyArch::Llama);
    let tokens = tokenizer.encode("é🙂x", false).unwrap();
    let mut stream = tokenizer.stream(true);
    let parts: Vec<Option<String>> = tokens.iter().map(|&token| stream.push(token)).collect();
    let expected = [None, Some("é"), None, None, None, Some("🙂"), Some("x")];
    assert_eq!(parts.iter().map(Option::as_deref).collect::<Vec<_>>(), expected);
    assert_eq!(stream.flush(), None);
    // Half a character, and then a whole one; a stream that ends in half a character; an id outside the vocabulary.
    assert_eq!((stream.push(tokens[2]), stream.push(tokens[6]).as_deref()), (None, Some("\u{fffd}x")));
    assert_eq!((stream.push(tokens[2]), stream.flush().as_deref(), stream.flush()), (None, Some("\u{fffd}"), None));
    assert_eq!(stream.push(1 << 20).as_deref(), Some("\u{fffd}"));
    assert_eq!(stream.push(2), None);
}

#[test]
fn a_vocabulary_that_is_none_is_named() {
    let error = |change: &dyn Fn(&mut model_support::tiny_model::GgufWriter)| {
        let text = Tokenizer::from_gguf(&tiny(|file| change(file))).unwrap_err().to_string();
        assert!(text.starts_with("tiny.gguf: ") && !text.contains('\n'), "{text}");
        text
    };
    let model = error(&|file| file.set("tokenizer.ggml.model", Meta::Text("llama".into())));
    assert!(model.contains("tokenizer.ggml.model is \"llama\", expected \"gpt2\""), "{model}");
    let pre = error(&|file| file.set("tokenizer.ggml.pre", Meta::Text("chameleon".into())));
    assert!(pre.contains("\"chameleon\", expected one of: gpt-2"), "{pre}");
    assert!(error(&|file| file.remove("tokenizer.ggml.tokens")).contains("tokens is absent or empty"));
    assert!(
        error(&|file| file.set("tokenizer.ggml.token_type", Meta::I32s(vec![1])))
            .contains("1 token types, expected 301")
    );
    assert!(
        error(&|file| file.set("tokenizer.ggml.eos_token_id", Meta::U32(301))).contains("is 301, expected below 301")
    );
    assert!(error(&|file| file.set("tokenizer.ggml.eos_token_id", Meta::I32(-1))).contains("the integer -1"));
    let merges = |merge: &str| error(&|file| file.set("tokenizer.ggml.merges", Meta::Texts(vec![merge.into()])));
    assert!(merges("abc").contains("merge 0 is \"abc\", expected two tokens"));
    assert!(merges("z q").contains("merges: "));
    let twice = error(&|file| {
        let mut tokens = model_support::tiny_model::tokens();
        tokens[300] = tokens[299].clone();
        file.set("tokenizer.ggml.tokens", Meta::Texts(tokens));
    });
    assert!(twice.contains("stands there twice"), "{twice}");
}

#[test]
fn long_texts_without_a_place_to_split_are_encoded() {
    let tokenizers = [tiny_tokenizer(TinyArch::Llama), tiny_tokenizer(TinyArch::Qwen2)];
    let real = smollm2().map(|model| Tokenizer::from_gguf(model.gguf()).unwrap());
    for tokenizer in tokenizers.iter().chain(&real) {
        let prose = "The quick brown fox jumps over the lazy dog, 42 times.\n".repeat(20_000);
        let letters = "a".repeat(200_000);
        let texts = [
            prose,
            letters,
            "語".repeat(100_000),
            " ".repeat(200_000) + "x",
            "\n".repeat(200_000),
            "-=".repeat(100_000),
        ];
        for text in texts {
            let tokens = tokenizer.encode(&text, false).unwrap();
            assert!(tokenizer.decode(&tokens, false) == text, "{:?}...", text.chars().next());
        }
    }
}

static BOTH: LazyLock<[Tokenizer; 2]> = LazyLock::new(|| [TinyArch::Llama, TinyArch::Qwen2].map(tiny_tokenizer));
static SMOLLM2: LazyLock<Option<Tokenizer>> =
    LazyLock::new(|| smollm2().map(|model| Tokenizer::from_gguf(model.gguf()).unwrap()));

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn decoding_gives_back_what_was_encoded(text in any::<String>(), words in "( ?(the|of|and|<\\|im_end\\|>|\u{e9}|🙂|[0-9]{1,3}|\n)){0,20}") {
        for tokenizer in BOTH.iter() {
            for text in [&text, &words] {
                for parse_special in [false, true] {
                    let tokens = tokenizer.encode(text, parse_special).unwrap();
                    prop_assert_eq!(&tokenizer.decode(&tokens, false), text);
                    let mut stream = tokenizer.stream(false);
                    let streamed: String = tokens.iter().filter_map(|&token| stream.push(token)).collect();
                    prop_assert_eq!((&streamed, stream.flush()), (text, None));
                }
                let plain = tokenizer.encode(text, false).unwrap();
                prop_assert!(plain.iter().all(|&token| !tokenizer.is_control(token)));
            }
        }
    }

    #[test]
    fn smollm2_decodes_what_it_encoded(texts in proptest::collection::vec(any::<String>(), 20)) {
        if let Some(tokenizer) = SMOLLM2.as_ref() {
            for text in texts {
                prop_assert_eq!(&tokenizer.decode(&tokenizer.encode(&text, false).unwrap(), false), &text);
            }
        }
    }
}
