//! The programs as a user meets them: exit codes, messages, JSON, interruption.
//!
//! The binaries are built before (`cargo build --profile checked --bins`, as `tests/run.sh` does) and found beside this test.

#![expect(clippy::print_stderr, reason = "a test that is skipped says so")]

use forebay_tests::golden::smollm2;
use forebay_tests::tiny_model::{TinyModel, write_tiny_model};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// A program of this build.
fn program(name: &str) -> Command {
    let test = std::env::current_exe().expect("a test knows its own path");
    let profile = test.parent().and_then(Path::parent).expect("tests lie in <target>/<profile>/deps");
    let path = profile.join(name);
    assert!(path.exists(), "{} is not built: cargo build --profile checked --bins", path.display());
    let mut command = Command::new(path);
    command.env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

/// A directory with a tiny model and an empty store.
struct Bench {
    dir: TempDir,
}

impl Bench {
    fn new() -> Bench {
        let bench = Bench { dir: tempfile::tempdir().expect("a temporary directory") };
        // With an output matrix of its own the model does not just repeat its input.
        let shape = TinyModel { tied_output: false, ..TinyModel::default() };
        write_tiny_model(&bench.model(), &shape).expect("the model is written");
        std::fs::create_dir(bench.store()).expect("the store directory is made");
        bench
    }

    fn model(&self) -> PathBuf {
        self.path("tiny.gguf")
    }

    fn store(&self) -> PathBuf {
        self.path("store")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
        std::fs::write(self.path(name), contents).expect("the file is written");
        self.path(name)
    }

    /// `program --model MODEL --store STORE args...`
    fn command(&self, name: &str, args: &[&str]) -> Command {
        let mut command = program(name);
        command.arg("--model").arg(self.model()).arg("--store").arg(self.store()).args(args);
        command
    }

    fn run(&self, name: &str, args: &[&str]) -> Output {
        self.command(name, args).output().expect("the program starts")
    }

    /// `forebay-tune SUBCOMMAND --model MODEL --store STORE args...`
    fn tune(&self, subcommand: &str, args: &[&str]) -> Output {
        let mut command = program("forebay-tune");
        command.arg(subcommand).arg("--model").arg(self.model()).arg("--store").arg(self.store()).args(args);
        command.output().expect("the program starts")
    }

    fn assert_store_is_empty(&self) {
        let left: Vec<_> = std::fs::read_dir(self.store()).expect("the store directory is there").collect();
        assert!(left.is_empty(), "left in the store: {left:?}");
    }
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("messages are UTF-8")
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("text is UTF-8")
}

#[track_caller]
fn assert_done(output: &Output) {
    assert_eq!(output.status.code(), Some(0), "{}", stderr(output));
}

/// Exit code 2, nothing on standard output, one line on standard error that begins with the program's name and says all `words`.
#[track_caller]
fn assert_refused(output: &Output, name: &str, words: &[&str]) {
    let message = stderr(output);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(output.stdout.is_empty(), "{}", stdout(output));
    assert_eq!(message.lines().count(), 1, "{message}");
    assert!(message.starts_with(&format!("{name}: ")), "{message}");
    for word in words {
        assert!(message.contains(word), "{word:?} is not in: {message}");
    }
}

#[track_caller]
fn json(output: &Output) -> Value {
    assert_done(output);
    let text = stdout(output);
    assert_eq!(text.lines().count(), 1, "one object and nothing else: {text}");
    serde_json::from_str(&text).expect("standard output is JSON")
}

#[track_caller]
fn assert_has(value: &Value, fields: &[&str]) {
    for field in fields {
        assert!(value.get(field).is_some(), "{field} is not in {value}");
    }
}

/// The fields of the command contract.
const FIELDS: [&str; 22] = [
    "text",
    "tokens",
    "prompt_tokens",
    "reused_tokens",
    "prefill_seconds",
    "decode_seconds",
    "decode_tokens_per_second",
    "kv_memory_bytes",
    "kv_full_bytes",
    "prefill_peak_bytes",
    "weights_bytes",
    "peak_rss_bytes",
    "disk_bytes_written",
    "disk_bytes_read",
    "disk_reads",
    "reuse_rate",
    "io_wait_seconds",
    "policy",
    "config",
    "device",
    "adapter",
    "adapter_source",
];

/// Prose of about `sentences` times ten words.
fn prose(sentences: usize) -> String {
    let subjects = ["The river", "A reservoir", "The turbine", "An engineer", "The old mill"];
    let verbs = ["carries", "holds", "measures", "needs", "loses"];
    let objects = ["the water of spring", "a little of everything", "what the field wants", "the height of the wall"];
    (0..sentences)
        .map(|i| {
            let end = if i % 7 == 6 { ".\n\n" } else { ". " };
            format!("{} {} {} in the year {}{end}", subjects[i % 5], verbs[i * 3 % 5], objects[i * 7 % 4], 1700 + i)
        })
        .collect()
}

const GENERATE: &str = "forebay-generate";
const SUMMARIZE: &str = "forebay-summarize";
const TUNE: &str = "forebay-tune";

#[test]
fn models_that_cannot_be_used_are_named() {
    let bench = Bench::new();
    let whole = std::fs::read(bench.model()).expect("the model is there");
    let mut wrong_magic = whole.clone();
    wrong_magic[..4].copy_from_slice(b"GGML");
    let mut absurd_count = whole.clone();
    // The number of tensors stands behind magic and version.
    absurd_count[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    let files = [
        ("missing.gguf", None),
        ("empty.gguf", Some(Vec::new())),
        ("truncated.gguf", Some(whole[..whole.len() / 2].to_vec())),
        ("cut-header.gguf", Some(whole[..100].to_vec())),
        ("wrong-magic.gguf", Some(wrong_magic)),
        ("absurd-count.gguf", Some(absurd_count)),
    ];
    for (name, contents) in files {
        if let Some(contents) = contents {
            bench.write(name, contents);
        }
        let mut command = program(GENERATE);
        command.arg("--model").arg(bench.path(name)).arg("--store").arg(bench.store()).args(["--prompt", "x"]);
        assert_refused(&command.output().expect("the program starts"), GENERATE, &[name]);
        bench.assert_store_is_empty();
    }
}

#[test]
fn store_directories_that_cannot_be_used_are_named() {
    let bench = Bench::new();
    let file = bench.write("a-file", "x");
    // /proc takes no files, not even from root.
    for dir in [bench.path("absent"), file, PathBuf::from("/proc")] {
        let mut command = program(GENERATE);
        command.arg("--model").arg(bench.model()).arg("--store").arg(&dir).arg("--prompt").arg(prose(60));
        let output = command.output().expect("the program starts");
        assert_refused(&output, GENERATE, &[&dir.display().to_string()]);
    }
    assert!(!bench.path("absent").exists());
}

#[test]
fn a_read_only_store_directory_is_named() {
    use std::os::unix::fs::PermissionsExt;
    let bench = Bench::new();
    std::fs::set_permissions(bench.store(), std::fs::Permissions::from_mode(0o555)).expect("its owner may");
    if std::fs::write(bench.store().join("probe"), "x").is_ok() {
        eprintln!("skipped: this user may write to read-only directories");
        return;
    }
    let output = bench.run(GENERATE, &["--prompt", &prose(60)]);
    assert_refused(&output, GENERATE, &[&bench.store().display().to_string()]);
}

#[test]
fn documents_that_are_no_text_are_named() {
    let bench = Bench::new();
    let documents: [(&str, &[u8], &str); 4] = [
        ("binary.pdf", b"%PDF-1.7\n\xff\xfe\x00", "byte 9"),
        ("nul.txt", b"text\0text", "byte 4"),
        ("empty.txt", b"", "empty"),
        ("blank.txt", b" \n\n", "empty"),
    ];
    for (name, contents, word) in documents {
        let path = bench.write(name, contents).display().to_string();
        assert_refused(&bench.run(SUMMARIZE, &[&path]), SUMMARIZE, &[name, word]);
        assert_refused(&bench.run(GENERATE, &["--prompt-file", &path]), GENERATE, &[name, word]);
    }
    assert_refused(&bench.run(SUMMARIZE, &["/nowhere/x.txt"]), SUMMARIZE, &["/nowhere/x.txt"]);
    let dir = bench.store().display().to_string();
    assert_refused(&bench.run(SUMMARIZE, &[&dir]), SUMMARIZE, &[&dir, "directory"]);
    bench.assert_store_is_empty();
}

#[test]
fn wrong_usage_is_one_line_that_names_the_option() {
    let bench = Bench::new();
    let cases: [(&[&str], &str); 12] = [
        (&[], "--prompt"),
        (&["--prompt", ""], "--prompt"),
        (&["--prompt", "x", "--session", "y"], "--session"),
        (&["--prompt", "x", "--kv-memory", "64MB"], "--kv-memory"),
        (&["--prompt", "x", "--policy", "best"], "--policy"),
        (&["--prompt", "x", "--disk", "tape"], "--disk"),
        (&["--prompt", "x", "--device", "cuda"], "--device"),
        (&["--prompt", "x", "--threads", "0"], "--threads"),
        (&["--prompt", "x", "--temperature", "nan"], "temperature"),
        (&["--prompt", "x", "--top-p", "1.5"], "top-p"),
        (&["--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens"),
        (&["--prompt", "x", "--set", "grop=4", "--max-new-tokens", "200"], "grop"),
    ];
    for (args, word) in cases {
        assert_refused(&bench.run(GENERATE, args), GENERATE, &[word]);
    }
    assert_refused(&bench.run(SUMMARIZE, &["--max-words", "0", "x"]), SUMMARIZE, &["--max-words"]);
    assert_refused(&program(TUNE).output().expect("the program starts"), TUNE, &[]);
    let depths = bench.tune("needle", &["--haystack", "x", "--context", "100", "--depths", "0.5,2"]);
    assert_refused(&depths, TUNE, &["--depths"]);
}

#[test]
fn a_prompt_longer_than_the_context_names_both_numbers() {
    let bench = Bench::new();
    let prompt = prose(40);
    let output = bench.run(GENERATE, &["--prompt", &prompt, "--context", "16"]);
    assert_refused(&output, GENERATE, &["--context 16", "the prompt has"]);
    let output = bench.run(GENERATE, &["--prompt", &prose(1000)]);
    assert_refused(&output, GENERATE, &["4096"]);
    bench.assert_store_is_empty();
}

#[test]
fn a_budget_that_is_too_small_names_the_smallest_that_works() {
    let bench = Bench::new();
    let prompt = prose(100);
    let output = bench.run(GENERATE, &["--prompt", &prompt, "--kv-memory", "1KiB", "--max-new-tokens", "4"]);
    assert_refused(&output, GENERATE, &["kv-memory", "1024"]);
    let message = stderr(&output);
    let smallest = message.split_whitespace().filter_map(|w| w.parse::<u64>().ok()).next_back();
    let smallest = smallest.expect("the message ends with a number of bytes");
    let run = |bytes: u64| {
        bench
            .run(GENERATE, &["--prompt", &prompt, "--kv-memory", &bytes.to_string(), "--max-new-tokens", "4", "--json"])
    };
    let report = json(&run(smallest));
    assert!(report["kv_memory_bytes"].as_u64().is_some_and(|b| b <= smallest), "{report}");
    assert_refused(&run(smallest - 1), GENERATE, &["kv-memory"]);
    bench.assert_store_is_empty();
}

#[test]
fn an_interrupted_prefill_ends_with_130_and_leaves_nothing() {
    let bench = Bench::new();
    let document = bench.write("long.txt", prose(20_000)).display().to_string();
    let args = ["--prompt-file", &document, "--context", "1000000", "--threads", "1"];
    for signal in ["INT", "TERM"] {
        let mut command = bench.command(GENERATE, &args);
        let mut child =
            command.env("RUST_LOG", "off").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
        std::thread::sleep(Duration::from_millis(1500));
        assert!(child.try_wait().expect("a child can be asked").is_none(), "prefill was over before the signal");
        let kill = Command::new("kill").arg(format!("-{signal}")).arg(child.id().to_string()).status();
        assert!(kill.expect("kill starts").success());
        let output = child.wait_with_output().expect("it ends");
        assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
        assert_eq!((stdout(&output), stderr(&output)), (String::new(), String::new()));
        bench.assert_store_is_empty();
    }
}

#[test]
fn a_reader_that_goes_away_ends_the_program_quietly() {
    let bench = Bench::new();
    let args = ["--prompt", "The river", "--max-new-tokens", "500", "--ignore-eos"];
    let mut child =
        bench.command(GENERATE, &args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("it ends");
    assert_eq!((output.status.code(), stderr(&output)), (Some(0), String::new()));
    bench.assert_store_is_empty();
}

#[test]
fn json_has_the_fields_of_the_contract_under_every_policy() {
    let bench = Bench::new();
    let prompt = prose(60);
    for policy in ["full", "forebay", "kvswap", "load-all", "window"] {
        let args = ["--prompt", &prompt, "--max-new-tokens", "8", "--ignore-eos", "--policy", policy, "--json"];
        let report = json(&bench.run(GENERATE, &args));
        assert_has(&report, &FIELDS);
        assert_eq!((&report["policy"], &report["tokens"]), (&Value::from(policy), &Value::from(8)));
        let number = |field: &str| report[field].as_f64().unwrap_or_else(|| panic!("{field} in {report}"));
        assert!(number("prompt_tokens") > 300.0 && number("decode_tokens_per_second") > 0.0, "{report}");
        assert!(number("weights_bytes") > 0.0 && number("peak_rss_bytes") > number("kv_memory_bytes"), "{report}");
        let plan: u64 = report["plan"]["kv"].as_object().expect("named bytes").values().filter_map(Value::as_u64).sum();
        assert_eq!(report["kv_memory_bytes"], plan);
        let on_disk = number("disk_bytes_written") > 0.0;
        assert_eq!(on_disk, !matches!(policy, "full" | "window"), "{report}");
        assert_eq!(report["adapter_source"].is_null(), !matches!(policy, "forebay" | "kvswap"), "{report}");
        bench.assert_store_is_empty();
    }
}

#[test]
fn the_same_seed_gives_the_same_text() {
    let bench = Bench::new();
    let run = |seed: &str| {
        let args =
            ["--prompt", "The river", "--temperature", "1", "--seed", seed, "--max-new-tokens", "40", "--ignore-eos"];
        let output = bench.run(GENERATE, &args);
        assert_done(&output);
        stdout(&output)
    };
    let seven = run("7");
    assert_eq!(run("7"), seven);
    assert_ne!(run("8"), seven);
}

#[test]
fn greedy_text_does_not_depend_on_threads_or_on_how_the_store_reads() {
    let bench = Bench::new();
    let prompt = prose(80);
    let run = |extra: &[&str]| {
        let mut args = vec!["--prompt", prompt.as_str(), "--max-new-tokens", "24", "--ignore-eos"];
        args.extend_from_slice(extra);
        let output = bench.run(GENERATE, &args);
        assert_done(&output);
        stdout(&output)
    };
    let one = run(&["--threads", "1"]);
    for threads in ["2", "7"] {
        assert_eq!(run(&["--threads", threads]), one, "{threads} threads");
    }
    assert_eq!(run(&["--io", "pread"]), one);
    assert_eq!(run(&["--disk", "ufs"]), one);
}

#[test]
fn prompts_of_one_token_and_of_the_whole_context_behave() {
    let bench = Bench::new();
    assert_done(&bench.run(GENERATE, &["--prompt", "a", "--max-new-tokens", "3", "--ignore-eos"]));
    let report = json(&bench.run(GENERATE, &["--prompt", &prose(20), "--max-new-tokens", "1", "--json"]));
    let tokens = report["prompt_tokens"].to_string();
    let args = ["--prompt", &prose(20), "--context", &tokens, "--max-new-tokens", "9", "--ignore-eos", "--json"];
    assert_eq!(json(&bench.run(GENERATE, &args))["tokens"], 1, "one token can be drawn and has no room");
    let less = (report["prompt_tokens"].as_u64().expect("a count") - 1).to_string();
    assert_refused(
        &bench.run(GENERATE, &["--prompt", &prose(20), "--context", &less]),
        GENERATE,
        &["--context", &less],
    );
}

#[test]
fn a_prompt_comes_from_standard_input_and_a_chat_has_a_template() {
    use std::io::Write;
    let bench = Bench::new();
    let args =
        ["--prompt-file", "-", "--chat", "--system", "Be brief.", "--max-new-tokens", "2", "--json", "--ignore-eos"];
    let mut child =
        bench.command(GENERATE, &args).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
    child.stdin.take().expect("a pipe").write_all("Grüße?".as_bytes()).expect("it reads");
    let chat = json(&child.wait_with_output().expect("it ends"));
    let raw = json(&bench.run(GENERATE, &["--prompt", "Grüße?", "--max-new-tokens", "2", "--json", "--ignore-eos"]));
    assert!(chat["prompt_tokens"].as_u64() > raw["prompt_tokens"].as_u64(), "{chat} {raw}");
}

#[test]
fn a_long_document_is_summarised_in_parts_and_says_so() {
    let bench = Bench::new();
    let document = bench.write("long.txt", prose(200)).display().to_string();
    let args = [&document, "--context", "1200", "--max-new-tokens", "24", "--json"];
    let output = bench.run(SUMMARIZE, &args);
    let report = json(&output);
    assert_has(&report, &FIELDS);
    let parts = report["parts"].as_u64().expect("a count");
    assert!(parts > 1, "{report}");
    assert_eq!(report["documents"], 1);
    let message = stderr(&output);
    assert!(message.contains("1200") && message.contains(&format!("{parts} parts")), "{message}");
    let short = bench.write("short.txt", prose(5)).display().to_string();
    let output = bench.run(SUMMARIZE, &[&short, &short, "--max-new-tokens", "8", "--json"]);
    let report = json(&output);
    assert_eq!((&report["documents"], &report["parts"]), (&Value::from(2), &Value::from(1)));
    assert_eq!(stderr(&output), "");
    let output = bench.run(SUMMARIZE, &[&document, "--context", "200", "--max-new-tokens", "24"]);
    assert_refused(&output, SUMMARIZE, &["--context", "200"]);
    bench.assert_store_is_empty();
}

#[test]
fn statistics_go_to_a_file_beside_the_text() {
    let bench = Bench::new();
    let stats = bench.path("stats.json").display().to_string();
    let output = bench.run(GENERATE, &["--prompt", "The river", "--max-new-tokens", "5", "--stats", &stats]);
    assert_done(&output);
    let report: Value = serde_json::from_slice(&std::fs::read(&stats).expect("it was written")).expect("it is JSON");
    assert_has(&report, &FIELDS);
    assert_eq!(report["text"], stdout(&output).trim_end_matches('\n'));
    let output = bench.run(GENERATE, &["--prompt", "The river", "--stats", "/nowhere/stats.json"]);
    assert_refused(&output, GENERATE, &["/nowhere/stats.json"]);
}

#[test]
fn evaluate_reports_what_the_contract_names() {
    let bench = Bench::new();
    let text = bench.write("text.txt", prose(200)).display().to_string();
    let common = ["--text", &text, "--context", "700", "--steps", "12", "--json"];
    let fields = [
        "kl",
        "agreement",
        "nll_full",
        "nll",
        "steps",
        "kv_memory_bytes",
        "kv_full_bytes",
        "reuse_rate",
        "disk_bytes_read",
    ];
    let one = json(&bench.tune("evaluate", &[&common[..], &["--offset", "50"]].concat()));
    assert_has(&one, &fields);
    assert_eq!((&one["policy"], &one["steps"]), (&Value::from("forebay"), &Value::from(12)));

    let args = [&common[..], &["--policy", "full,load-all,window", "--text", &text]].concat();
    let several = json(&bench.tune("evaluate", &args));
    let rows = several["results"].as_array().expect("a row per policy");
    let names: Vec<_> = rows.iter().map(|r| r["policy"].as_str().unwrap_or_default()).collect();
    assert_eq!(names, ["full", "load-all", "window"]);
    for row in rows {
        assert_has(row, &fields);
        assert_eq!(row["texts"].as_array().map(Vec::len), Some(2));
    }
    // The full cache against itself differs by nothing; with every group read back only partitions of sums differ.
    assert_eq!(rows[0]["kl"], 0.0);
    assert!(rows[1]["kl"].as_f64().is_some_and(|kl| kl < 1e-5), "{}", rows[1]);
    assert_eq!(rows[1]["agreement"], 1.0);
    assert!(rows[2]["kl"].as_f64() > rows[1]["kl"].as_f64(), "{}", rows[2]);

    let short = bench.tune("evaluate", &["--text", &text, "--context", "700", "--offset", "100000", "--json"]);
    assert_refused(&short, TUNE, &["text.txt", "100829"]);
    bench.assert_store_is_empty();
}

#[test]
fn needle_reports_what_the_contract_names() {
    let bench = Bench::new();
    let text = bench.write("hay.txt", prose(300)).display().to_string();
    let args = ["--haystack", &text, "--context", "800", "--depths", "0.1,0.9", "--cases", "2", "--json"];
    let report = json(&bench.tune("needle", &args));
    assert_has(&report, &["cases", "correct_full", "correct", "depths"]);
    assert_eq!(report["cases"], 4);
    let depths = report["depths"].as_array().expect("a row per depth");
    assert_eq!(depths.iter().filter_map(|d| d["cases"].as_u64()).collect::<Vec<_>>(), [2, 2]);
    let refused = bench.tune("needle", &["--haystack", &text, "--context", "200000"]);
    assert_eq!(refused.status.code(), Some(2), "{}", stderr(&refused));
    bench.assert_store_is_empty();
}

#[test]
fn the_real_model_answers() {
    let Some(model) = smollm2() else { return };
    let bench = Bench::new();
    let mut command = program(GENERATE);
    command.arg("--model").arg(model).arg("--store").arg(bench.store());
    // With 8-bit activations a model this small answers in French at times.
    command.args(["--chat", "--exact", "--prompt", "What is the capital of France?", "--max-new-tokens", "16"]);
    let output = command.output().expect("the program starts");
    assert_done(&output);
    assert!(stdout(&output).contains("Paris"), "{}", stdout(&output));
    bench.assert_store_is_empty();
}
