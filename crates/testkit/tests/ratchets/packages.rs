//! Crates that are published: their metadata, and that they are complete without the rest of the repository.

use std::fs;
use std::path::{Component, Path};
use std::str::FromStr as _;

use proc_macro2::{TokenStream, TokenTree};
use serde_json::Value;

use super::bans::{collect_sources, end_of_item, is_punct, is_test_attribute};
use super::edges::{metadata, packages};

#[test]
fn published_crates_state_what_a_package_registry_shows() {
    let metadata = metadata();
    let releasing = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/releasing.md");
    let releasing = fs::read_to_string(releasing).expect("docs/releasing.md");
    let mut wrong = Vec::new();
    for package in published(&metadata) {
        let name = package["name"].as_str().expect("name");
        for field in [
            "description",
            "license",
            "readme",
            "documentation",
            "rust_version",
        ] {
            if !package[field].is_string() {
                wrong.push(format!("{name}: no {field}"));
            }
        }
        for (field, most) in [("keywords", 5), ("categories", 5)] {
            let count = package[field].as_array().map_or(0, Vec::len);
            if count == 0 || count > most {
                wrong.push(format!("{name}: {count} {field}, expected 1 to {most}"));
            }
        }
        if !package["metadata"]["docs"]["rs"]["targets"].is_array() {
            wrong.push(format!("{name}: no targets for docs.rs"));
        }
        let short = name.replace("exec-server-", "-");
        if !releasing.contains(&format!("`{name}`")) && !releasing.contains(&format!("`{short}`")) {
            wrong.push(format!("{name}: not in the table of docs/releasing.md"));
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn published_crates_include_no_file_from_outside_their_package() {
    let metadata = metadata();
    let mut wrong = Vec::new();
    for package in published(&metadata) {
        let manifest = Path::new(package["manifest_path"].as_str().expect("manifest_path"));
        let top = manifest.parent().expect("directory");
        let mut files = Vec::new();
        collect_sources(&top.join("src"), &mut files);
        assert!(!files.is_empty(), "{} has no sources", top.display());
        for file in files {
            let source = fs::read_to_string(&file).expect("source");
            let tokens = TokenStream::from_str(&source).expect("tokens");
            let inside = file.strip_prefix(top).expect("below the package");
            for included in included_files(tokens) {
                let path = inside.parent().expect("directory").join(&included);
                if leaves_its_root(&path) {
                    wrong.push(format!("{} includes {included}", file.display()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn included_files_of_tests_and_doctests_are_not_counted() {
    let source = r##"
        #![cfg_attr(doctest, doc = include_str!("../../guide.md"))]
        #![doc = include_str!("../../embedded.md")]
        const PAGE: &str = include_str!("page.html");
        #[cfg(test)]
        mod tests {
            const EXAMPLE: &str = include_str!("../../example.toml");
        }
    "##;
    let found = included_files(TokenStream::from_str(source).expect("tokens"));
    assert_eq!(found, ["../../embedded.md", "page.html"]);
    assert!(leaves_its_root(Path::new("src/../../embedded.md")));
    assert!(!leaves_its_root(Path::new("src/environment/../page.html")));
}

fn published(metadata: &Value) -> Vec<&Value> {
    // `publish = false` is an empty list of registries.
    let found: Vec<&Value> = packages(metadata)
        .filter(|package| package["publish"].is_null())
        .collect();
    assert!(found.len() > 10, "{} crates", found.len());
    found
}

/// Arguments of `include_str!` and `include_bytes!` outside of code that is compiled for tests only.
fn included_files(tokens: TokenStream) -> Vec<String> {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let mut found = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        match &tokens[at] {
            TokenTree::Punct(_)
                if is_punct(tokens.get(at), '#') && is_test_attribute(tokens.get(at + 1)) =>
            {
                at = end_of_item(&tokens, at);
                continue;
            }
            TokenTree::Group(group) => {
                let text = group.stream().to_string().replace(' ', "");
                if !text.starts_with("cfg_attr(doctest,") {
                    found.extend(included_files(group.stream()));
                }
            }
            TokenTree::Ident(ident) if ident == "include_str" || ident == "include_bytes" => {
                if let Some(TokenTree::Group(argument)) = tokens.get(at + 2) {
                    let path = argument.stream().to_string();
                    found.push(path.trim_matches('"').to_owned());
                }
            }
            _ => {}
        }
        at += 1;
    }
    found
}

/// Whether a relative path has more `..` than directories before them.
fn leaves_its_root(path: &Path) -> bool {
    let mut depth = 0_i32;
    path.components().any(|component| {
        depth += if component == Component::ParentDir {
            -1
        } else {
            1
        };
        depth < 0
    })
}
