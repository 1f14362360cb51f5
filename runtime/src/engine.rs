//! Model, threads and settings: what makes sessions.

use crate::cache::group::GroupLayout;
use crate::cache::policy::{self, Room};
use crate::config::{CacheConfig, ConfigFile, ConfigSource, Policy};
use crate::error::{Error, Result};
use crate::model::transformer::Transformer;
use crate::model::{ChatTemplate, Model, Tokenizer};
use crate::plan::{MemoryPlan, ModelShape, full_layout, plan_full, prefill_chunk};
use crate::session::{Session, SessionParts};
use crate::store::{self, Arena, FaultOptions, IoBackend, Store, StoreLayout, StoreOptions};
use forebay_kernels::prefill_attention::KvElement;
use forebay_kernels::{Isa, Pool, Precision};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How much memory the KV side may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvMemory {
    /// A tenth of the full f16 cache of the session's capacity, and at least the smallest plan.
    Default,
    /// As much as policy `full` needs.
    Full,
    /// The full f16 cache of the session's capacity divided by this; 0 counts as 1.
    Share(u32),
    /// This many bytes.
    Bytes(u64),
}

/// What an engine is made with.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Worker threads, the calling one counted; 0 means one per physical core.
    pub threads: usize,
    /// Arithmetic of the weight products.
    pub precision: Precision,
    /// Directory of the group store.
    pub store_dir: PathBuf,
    /// How the store does its I/O.
    pub io: IoBackend,
    /// Device class that reads and writes are slowed down to.
    pub disk: store::DiskClass,
    /// Verify the checksum of every record that is read.
    pub verify: bool,
    /// Settings of the tiers, from a file.
    pub config: Option<PathBuf>,
    /// Faults that the store's device has, for tests of what they do to a session.
    pub faults: Option<FaultOptions>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            threads: 0,
            precision: Precision::Fast,
            store_dir: std::env::temp_dir(),
            io: IoBackend::Auto,
            disk: store::DiskClass::Native,
            verify: true,
            config: None,
            faults: None,
        }
    }
}

/// What a session is made with.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    /// Tokens that the session may hold, prompt and answer together.
    pub capacity: usize,
    /// Policy of the cache.
    pub policy: Policy,
    /// KV-side memory.
    pub kv_memory: KvMemory,
    /// Bytes that prefill may hold besides; a prompt that needs more goes through in parts.
    pub prefill_memory: u64,
    /// `key=value` pairs that replace single settings of the tiers.
    pub overrides: String,
    /// Bytes that the session may write to its store in all; flash wears. A prompt or a step that would exceed it is an error before it begins.
    pub write_budget: Option<u64>,
}

impl SessionOptions {
    /// Bytes that prefill may hold besides, where nothing is said.
    pub const DEFAULT_PREFILL_MEMORY: u64 = 512 << 20;

    /// Policy `forebay` with defaults for `capacity` tokens.
    pub fn new(capacity: usize) -> SessionOptions {
        SessionOptions {
            capacity,
            policy: Policy::Forebay,
            kv_memory: KvMemory::Default,
            prefill_memory: Self::DEFAULT_PREFILL_MEMORY,
            overrides: String::new(),
            write_budget: None,
        }
    }
}

/// A model with its threads. Shared (`Arc`) by its sessions; all methods may be called from any thread.
pub struct Engine {
    transformer: Transformer,
    tokenizer: Tokenizer,
    chat: ChatTemplate,
    options: EngineOptions,
    config: Option<ConfigFile>,
}

/// Share of the full cache that the default budget takes.
const DEFAULT_SHARE: u64 = 10;

impl Engine {
    /// Opens a model; nothing of the KV side is allocated yet.
    pub fn open(path: &Path, options: EngineOptions) -> Result<Arc<Engine>> {
        Self::from_model(Model::open(path)?, options)
    }

    /// The same with a model that is open already.
    pub fn from_model(model: Model, options: EngineOptions) -> Result<Arc<Engine>> {
        let model = Arc::new(model);
        let tokenizer = Tokenizer::from_gguf(model.gguf())?;
        let chat = ChatTemplate::from_gguf(model.gguf())?;
        let threads = if options.threads == 0 { Pool::default_threads() } else { options.threads };
        if threads > MAX_THREADS {
            return Err(Error::argument("threads", threads, format!("1 to {MAX_THREADS}")));
        }
        let config = options.config.as_deref().map(|p| Self::read_config(p, &model)).transpose()?;
        let pool = Arc::new(Pool::new(threads));
        let transformer = Transformer::new(model, pool, Isa::best(), options.precision);
        Ok(Arc::new(Engine { transformer, tokenizer, chat, options, config }))
    }

    fn read_config(path: &Path, model: &Model) -> Result<ConfigFile> {
        let file = ConfigFile::read(path)?;
        let found = &file.model;
        let fingerprint = fingerprint_text(model);
        if found.fingerprint != fingerprint {
            return Err(Error::ConfigFile {
                file: path.display().to_string(),
                found: format!("made for model {} ({})", found.fingerprint, found.name),
                expected: format!("{fingerprint} ({})", model.config().name),
            });
        }
        Ok(file)
    }

    /// The arithmetic.
    pub fn transformer(&self) -> &Transformer {
        &self.transformer
    }

    /// The model.
    pub fn model(&self) -> &Model {
        self.transformer.model()
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The chat template.
    pub fn chat(&self) -> &ChatTemplate {
        &self.chat
    }

    /// The options that the engine was made with.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// Where the settings of sessions come from.
    pub fn config_source(&self) -> ConfigSource {
        match (&self.config, &self.options.config) {
            (Some(_), Some(path)) => ConfigSource::File(path.display().to_string()),
            _ => ConfigSource::Defaults,
        }
    }

    /// The model's shape.
    pub fn shape(&self) -> ModelShape {
        let c = self.model().config();
        ModelShape {
            layers: c.layers,
            heads: c.heads,
            kv_heads: c.kv_heads,
            head_dim: c.head_dim,
            embed: c.embed,
            ffn: c.ffn,
        }
    }

    /// Values of one token's queries and of its keys.
    pub(crate) fn widths(&self) -> (usize, usize) {
        let c = self.model().config();
        (c.heads * c.head_dim, c.kv_heads * c.head_dim)
    }

    pub(crate) fn attention_scale(&self) -> f32 {
        1.0 / (self.model().config().head_dim as f32).sqrt()
    }

    /// Number format of policy `full`'s cache: single precision where arithmetic is to be exact.
    pub(crate) fn full_element(&self) -> KvElement {
        match self.options.precision {
            Precision::Exact => KvElement::F32,
            Precision::Fast => KvElement::F16,
        }
    }

    /// Direct-I/O alignment of the store directory.
    pub(crate) fn alignment(&self) -> Result<usize> {
        let alignment = store::probe(&self.options.store_dir)?;
        // Records follow each other in the file and in memory alike.
        Ok(alignment.offset.max(alignment.memory) as usize)
    }

    pub(crate) fn open_store(
        &self,
        layout: &GroupLayout,
        groups: usize,
        plan_groups: usize,
        write_budget_bytes: Option<u64>,
        arenas: &[Arc<Arena>],
    ) -> Result<Store> {
        let c = self.model().config();
        let options = StoreOptions {
            backend: self.options.io,
            fingerprint: self.model().fingerprint(),
            throttle: self.options.disk,
            faults: self.options.faults.clone(),
            checksums: self.options.verify,
            pool: Some(self.transformer.shared_pool()),
            plan_groups_max: plan_groups,
            write_budget_bytes,
            ..StoreOptions::new(&self.options.store_dir)
        };
        let alignment = store::probe(&self.options.store_dir)?;
        let count = |what, n: usize| u32::try_from(n).map_err(|_| Error::argument(what, n, "a number below 2^32"));
        let (layers, groups) = (count("layers", c.layers)?, count("groups", groups)?);
        let layout = StoreLayout::new(layers, groups, count("record bytes", layout.record_bytes())?, alignment)?;
        Ok(Store::create(options, layout, arenas)?)
    }

    /// Settings and memory plan of a session, before anything is taken.
    pub fn plan(&self, options: &SessionOptions) -> Result<(Option<CacheConfig>, MemoryPlan)> {
        let parts = self.parts(options)?;
        Ok((parts.config, parts.plan))
    }

    /// A session with no tokens yet; its KV-side memory is taken here.
    pub fn session(self: &Arc<Self>, options: &SessionOptions) -> Result<Session> {
        let parts = self.parts(options)?;
        Session::new(self.clone(), parts)
    }

    fn parts(&self, options: &SessionOptions) -> Result<SessionParts> {
        let capacity = options.capacity;
        if capacity == 0 || capacity > crate::config::MAX_TOKENS {
            return Err(Error::argument("context", capacity, format!("1 to {} tokens", crate::config::MAX_TOKENS)));
        }
        let shape = self.shape();
        let policy = if options.kv_memory == KvMemory::Full { Policy::Full } else { options.policy };
        let alignment = if policy == Policy::Full { 1 } else { self.alignment()? };
        let (budget, given) = match options.kv_memory {
            KvMemory::Bytes(bytes) => (bytes, true),
            KvMemory::Full => (u64::MAX, true),
            KvMemory::Share(parts) => (shape.full_bytes(capacity) / u64::from(parts.max(1)), true),
            KvMemory::Default if matches!(policy, Policy::Full | Policy::LoadAll) => (u64::MAX, true),
            KvMemory::Default => (shape.full_bytes(capacity) / DEFAULT_SHARE, false),
        };
        let element = self.full_element();
        let mut room = Room { shape, capacity, prefill_tokens: capacity, alignment, element, budget };
        let mut config = match (&self.config, policy) {
            (Some(file), Policy::Forebay) => Some(file.solution(capacity).clone()),
            _ => match policy::settings(policy, &room) {
                Err(Error::Budget { smallest, .. }) if !given => {
                    room.budget = smallest;
                    policy::settings(policy, &room)?
                }
                other => other?,
            },
        };
        if let Some(config) = &mut config {
            config.apply_overrides(&options.overrides)?;
            config.validate(shape.kv_heads * shape.head_dim)?;
        } else if !options.overrides.is_empty() {
            return Err(Error::argument("--set", &options.overrides, "no settings: policy full has none"));
        }
        let layout = match &config {
            Some(c) => GroupLayout::new(shape.kv_heads, shape.head_dim, c.group, alignment),
            None => full_layout(&shape, element),
        };
        let prefill_chunk = prefill_chunk(&shape, &layout, capacity, options.prefill_memory);
        room.prefill_tokens = prefill_chunk;
        let plan = match &config {
            Some(c) => room.plan(c),
            None => plan_full(&shape, capacity, prefill_chunk, element),
        };
        if plan.kv_bytes() > room.budget && (given || self.config.is_none() && options.overrides.is_empty()) {
            let (given, smallest) = (room.budget, plan.kv_bytes());
            return Err(Error::Budget { given, smallest, context: capacity, policy: policy.name() });
        }
        let write_budget = options.write_budget;
        Ok(SessionParts { policy, config, plan, capacity, prefill_chunk, write_budget })
    }
}

/// A model's fingerprint as configuration files write it.
pub fn fingerprint_text(model: &Model) -> String {
    let hex: String = model.fingerprint().iter().map(|b| format!("{b:02x}")).collect();
    format!("sha256:{hex}")
}

/// More threads than this are a typing error.
const MAX_THREADS: usize = 1024;
