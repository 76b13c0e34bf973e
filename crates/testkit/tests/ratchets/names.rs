//! Names of types: one name, one definition, in the whole tree.
//!
//! A search for the name of a type finds its definition at once, and a reader never takes one type for another. Public
//! names must be unique. Of all names, tests and macros of the tree included, at most [`SHARED_PERCENT`] may have several
//! definitions; lower the constant when the share has fallen. Associated types are not counted.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr as _;

use proc_macro2::{Delimiter, TokenStream, TokenTree};

use crate::bans::collect_sources;

/// Highest share of names with several definitions. Other projects in Rust of this size have 5 to 14 %.
const SHARED_PERCENT: usize = 1;

/// A definition: its file, and whether it is `pub` without a restriction.
type Definition = (String, bool);

#[test]
fn type_names_have_one_definition() {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut files = Vec::<PathBuf>::new();
    collect_sources(&top.join("crates"), &mut files);
    assert!(files.len() > 400, "{} files", files.len());
    let mut names = BTreeMap::<String, Vec<Definition>>::new();
    for file in files {
        let name = file
            .strip_prefix(&top)
            .expect("below the top")
            .display()
            .to_string();
        let source = fs::read_to_string(&file).expect("source");
        let tokens = TokenStream::from_str(&source).expect("tokens");
        collect_types(tokens, false, &mut |type_name, public| {
            names
                .entry(type_name)
                .or_default()
                .push((name.clone(), public));
        });
    }
    let shared: Vec<_> = names.iter().filter(|(_, all)| all.len() > 1).collect();
    let public: Vec<_> = shared
        .iter()
        .filter(|(_, all)| all.iter().filter(|(_, public)| *public).count() > 1)
        .collect();
    assert!(public.is_empty(), "public names used twice: {public:#?}");
    assert!(
        shared.len() * 100 <= names.len() * SHARED_PERCENT,
        "{} of {} type names have several definitions: {shared:#?}",
        shared.len(),
        names.len()
    );
}

#[test]
fn type_scanner_skips_associated_types_variants_and_strings() {
    let source = r##"
        pub struct First;
        enum Second { Struct, Variant { pub_: u8 } }
        impl Iterator for First { type Item = u8; fn next(&mut self) { struct Inner; } }
        pub(crate) trait Third { type Associated; }
        mod nested { pub type Fourth<'a> = &'a str; const TEXT: &str = "struct Fifth"; }
        macro_rules! define { ($name:ident) => { pub struct $name; } }
    "##;
    let mut found = Vec::new();
    let tokens = TokenStream::from_str(source).expect("tokens");
    collect_types(tokens, false, &mut |name, public| {
        found.push((name, public))
    });
    let expected = [
        ("First", true),
        ("Second", false),
        ("Inner", false),
        ("Third", false),
        ("Fourth", true),
    ];
    assert_eq!(
        found,
        expected.map(|(name, public)| (name.to_owned(), public))
    );
}

/// Passes the name of each type that `tokens` define to `found`, and whether it is `pub`. `associated`: whether the tokens
/// are the body of an implementation or a trait, where `type` declares an associated type.
fn collect_types(tokens: TokenStream, associated: bool, found: &mut impl FnMut(String, bool)) {
    let tokens: Vec<_> = tokens.into_iter().collect();
    let mut in_header = false;
    for (at, token) in tokens.iter().enumerate() {
        match token {
            TokenTree::Ident(word) => {
                let word = word.to_string();
                in_header |= matches!(word.as_str(), "impl" | "trait");
                let defines = match word.as_str() {
                    "struct" | "enum" | "union" | "trait" => true,
                    "type" => !associated,
                    _ => false,
                };
                if defines && let Some(TokenTree::Ident(name)) = tokens.get(at + 1) {
                    let before = at.checked_sub(1).map(|before| tokens[before].to_string());
                    found(name.to_string(), before.as_deref() == Some("pub"));
                }
            }
            TokenTree::Punct(mark) if mark.as_char() == ';' => in_header = false,
            TokenTree::Group(group) => {
                let body = group.delimiter() == Delimiter::Brace;
                collect_types(group.stream(), body && in_header, found);
                in_header &= !body;
            }
            _ => {}
        }
    }
}
