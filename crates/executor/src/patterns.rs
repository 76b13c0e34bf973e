//! Compiled regular expressions of waits, which all waits of this program share.
//!
//! An expression that several waits use is compiled and kept once. Its memory counts for each owner
//! that uses it, and once in the sum of the program.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use exec_server_sync::Mutex;
use regex_automata::meta::Regex;

/// Memory of all expressions together: 128 MiB.
const MAX_BYTES: usize = 128 << 20;

/// Memory of the expressions of one owner: half, so that others have room.
const MAX_OWNER_BYTES: usize = MAX_BYTES / 2;

/// Maximum memory of the matcher's cache for one expression and direction: 4 MiB, enough for the
/// states of an expression like `(x\n){1000}z`. With less, its search is a thousand times slower.
pub(crate) const CACHE_BYTES: usize = 4 << 20;

/// A compiled expression.
#[derive(Debug)]
pub(crate) struct CompiledPattern {
    pub(crate) regex: Regex,
    /// Output after a match cannot change the match.
    pub(crate) is_definite: bool,
    /// Whether the expression is only text, which needs no cache.
    pub(crate) is_literal: bool,
}

impl CompiledPattern {
    fn bytes(&self) -> usize {
        let program = self.regex.memory_usage();
        let caches = match self.is_literal {
            true => 0,
            // Two directions. The cache of a small program stays small.
            false => (2 * CACHE_BYTES).min(8 * program),
        };
        program + caches
    }
}

/// Use of an expression by one wait.
#[derive(Debug)]
pub(crate) struct PatternUse {
    pattern: Arc<CompiledPattern>,
    text: Arc<str>,
    owner: Arc<str>,
    table: &'static Mutex<PatternTable>,
}

#[derive(Debug)]
pub(crate) struct PatternTable {
    compiled: BTreeMap<Arc<str>, Weak<CompiledPattern>>,
    owners: BTreeMap<Arc<str>, OwnerPatterns>,
    bytes: usize,
}

/// Expressions of one owner.
#[derive(Debug, Default)]
struct OwnerPatterns {
    bytes: usize,
    /// Number of uses of each expression.
    uses: BTreeMap<Arc<str>, usize>,
}

/// Why an expression cannot be used.
#[derive(Debug)]
pub(crate) enum PatternError<E> {
    Compile(E),
    /// The limit in bytes that is reached.
    TooMuch(usize),
}

static TABLE: Mutex<PatternTable> = Mutex::new(PatternTable {
    compiled: BTreeMap::new(),
    owners: BTreeMap::new(),
    bytes: 0,
});

impl PatternUse {
    /// Uses an expression for an owner; `compile` is called if it is not in use yet.
    pub(crate) fn new<E>(
        owner: &Arc<str>,
        text: &str,
        compile: impl FnOnce() -> Result<CompiledPattern, E>,
    ) -> Result<Self, PatternError<E>> {
        Self::new_in(&TABLE, owner, text, compile)
    }

    fn new_in<E>(
        table: &'static Mutex<PatternTable>,
        owner: &Arc<str>,
        text: &str,
        compile: impl FnOnce() -> Result<CompiledPattern, E>,
    ) -> Result<Self, PatternError<E>> {
        let known = table.lock().find(text);
        let (text, pattern) = match known {
            Some(known) => known,
            // Compiled without the lock: this takes milliseconds.
            None => (
                text.into(),
                Arc::new(compile().map_err(PatternError::Compile)?),
            ),
        };
        let mut locked = table.lock();
        // Another wait may have compiled it meanwhile.
        let (text, pattern) = locked.find(&text).unwrap_or((text, pattern));
        locked
            .add(owner, &text, &pattern)
            .map_err(PatternError::TooMuch)?;
        drop(locked);
        Ok(Self {
            pattern,
            text,
            owner: Arc::clone(owner),
            table,
        })
    }

    pub(crate) fn pattern(&self) -> &CompiledPattern {
        &self.pattern
    }
}

impl Drop for PatternUse {
    fn drop(&mut self) {
        self.table
            .lock()
            .remove(&self.owner, &self.text, &self.pattern);
    }
}

impl PatternTable {
    fn find(&self, text: &str) -> Option<(Arc<str>, Arc<CompiledPattern>)> {
        let (text, pattern) = self.compiled.get_key_value(text)?;
        Some((Arc::clone(text), pattern.upgrade()?))
    }

    fn add(
        &mut self,
        owner: &Arc<str>,
        text: &Arc<str>,
        pattern: &Arc<CompiledPattern>,
    ) -> Result<(), usize> {
        let bytes = pattern.bytes();
        let is_new = !self.compiled.contains_key(text);
        if is_new && self.bytes + bytes > MAX_BYTES {
            return Err(MAX_BYTES);
        }
        let used = self.owners.entry(Arc::clone(owner)).or_default();
        if !used.uses.contains_key(text) && used.bytes + bytes > MAX_OWNER_BYTES {
            return Err(MAX_OWNER_BYTES);
        }
        let count = used.uses.entry(Arc::clone(text)).or_insert(0);
        if *count == 0 {
            used.bytes += bytes;
        }
        *count += 1;
        if is_new {
            self.bytes += bytes;
            self.compiled
                .insert(Arc::clone(text), Arc::downgrade(pattern));
        }
        Ok(())
    }

    fn remove(&mut self, owner: &Arc<str>, text: &Arc<str>, pattern: &CompiledPattern) {
        let bytes = pattern.bytes();
        if let Some(used) = self.owners.get_mut(owner)
            && let Some(count) = used.uses.get_mut(text)
        {
            *count -= 1;
            if *count == 0 {
                used.uses.remove(text);
                used.bytes -= bytes;
            }
            if used.uses.is_empty() {
                self.owners.remove(owner);
            }
        }
        let is_used = self
            .owners
            .values()
            .any(|used| used.uses.contains_key(text));
        if !is_used && self.compiled.remove(text).is_some() {
            self.bytes -= bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> &'static Mutex<PatternTable> {
        Box::leak(Box::new(Mutex::new(PatternTable {
            compiled: BTreeMap::new(),
            owners: BTreeMap::new(),
            bytes: 0,
        })))
    }

    fn used(
        table: &'static Mutex<PatternTable>,
        owner: &str,
        text: &str,
    ) -> Result<PatternUse, PatternError<()>> {
        PatternUse::new_in(table, &owner.into(), text, || {
            Ok(CompiledPattern {
                regex: Regex::new(text).unwrap(),
                is_definite: false,
                is_literal: false,
            })
        })
    }

    #[test]
    fn expression_is_compiled_once_while_it_is_used() {
        let table = table();
        let first = used(table, "a", "x+").unwrap();
        let bytes = table.lock().bytes;
        let never = || -> Result<CompiledPattern, ()> { panic!("compiled again") };
        let second = PatternUse::new_in(table, &"b".into(), "x+", never).unwrap();
        assert!(std::ptr::eq(first.pattern(), second.pattern()));
        assert_eq!(table.lock().bytes, bytes);
        drop(first);
        assert_eq!(table.lock().bytes, bytes);
        drop(second);
        let locked = table.lock();
        assert_eq!(locked.bytes, 0);
        assert!(locked.compiled.is_empty() && locked.owners.is_empty());
    }

    #[test]
    fn owner_that_exhausts_its_share_leaves_room_for_others() {
        let table = table();
        let mut held = Vec::new();
        let refused = (0..).find_map(|number| {
            match used(table, "a", &format!("(?:[a-z]{{500}}x{number})+")) {
                Ok(one) => {
                    held.push(one);
                    None
                }
                Err(error) => Some(error),
            }
        });
        let limit = MAX_OWNER_BYTES;
        assert!(matches!(refused, Some(PatternError::TooMuch(at)) if at == limit));
        assert!(table.lock().bytes <= MAX_OWNER_BYTES);
        let _other = used(table, "b", "y+").unwrap();
        drop(held);
        assert!(used(table, "a", "(?:[a-z]{500}x)+").is_ok());
    }
}
