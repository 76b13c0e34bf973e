//! Listings of files: `fs ls`, `fs stat` and `fs walk`.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::process::ExitCode;
use std::sync::atomic::Ordering;

use anyhow::Context as _;
use exec_server_client::ExecServerError;
use exec_server_client::fs::{
    DirectoryPages, Feature, ReadDirectoryOptions, TreeWalkOptions, WalkPages, child,
};
use exec_server_protocol::PathUri;
use exec_server_protocol::fs::{DirectoryEntry, MetadataResult, WalkResult};
use exec_server_protocol::limits::MAX_PAGE_ENTRIES;
use exec_server_transport::time::date_and_time;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::args::{LsArgs, StatArgs, WalkArgs};
use super::progress::{FoundCount, with_counter};
use super::{FilesLocation, native_bytes, prints_to_terminal, push_line, shown};
use crate::cli::error::{notice, report};
use crate::cli::print;
use crate::cli::table::{bytes, columns, visible};

/// Maximum concurrent requests for metadata.
const PARALLEL: usize = 32;

/// One line of a listing.
struct ListingLine {
    name: OsString,
    path: PathUri,
    kind: &'static str,
    target: Option<String>,
    found: Option<MetadataResult>,
}

pub(super) async fn ls(location: &FilesLocation, args: &LsArgs) -> anyhow::Result<ExitCode> {
    let mut listed = Vec::new();
    let for_terminal = prints_to_terminal();
    let mut code = ExitCode::SUCCESS;
    let mut gap = "";
    for path in &args.paths {
        let uri = location.uri(path).await?;
        let mut listing = ListingLines::of(location, &uri, args);
        let mut heading = args.paths.len() > 1;
        loop {
            let page = listing.next().await;
            let lines = match page.with_context(|| format!("cannot list `{}`", path.display())) {
                Ok(Some(lines)) => lines,
                Ok(None) => break,
                // Other paths are still listed after one that cannot be.
                Err(error) => {
                    report(&error);
                    code = ExitCode::FAILURE;
                    break;
                }
            };
            if args.json {
                listed.extend(lines.iter().map(to_json));
                continue;
            }
            let mut out = Vec::new();
            if std::mem::take(&mut heading) {
                out.extend_from_slice(format!("{gap}{}:\n", visible(&shown(&uri))).as_bytes());
            }
            gap = "\n";
            if args.long {
                out.extend_from_slice(long_listing(&lines).as_bytes());
            } else {
                for line in &lines {
                    push_line(&mut out, line.name.as_bytes(), for_terminal);
                }
            }
            print(&out)?;
        }
    }
    if args.json {
        let mut out = serde_json::to_vec_pretty(&listed)?;
        out.push(b'\n');
        print(&out)?;
    }
    Ok(code)
}

/// Lines of one path, loaded page by page.
struct ListingLines<'a> {
    location: &'a FilesLocation,
    path: &'a PathUri,
    args: &'a LsArgs,
    has_printed: bool,
    /// Pages of a directory; `None` before the first request and for files.
    pages: Option<DirectoryPages>,
}

impl<'a> ListingLines<'a> {
    fn of(location: &'a FilesLocation, path: &'a PathUri, args: &'a LsArgs) -> Self {
        Self {
            location,
            path,
            args,
            has_printed: false,
            pages: None,
        }
    }

    /// Returns the next lines in order; `None` after the last ones.
    async fn next(&mut self) -> anyhow::Result<Option<Vec<ListingLine>>> {
        if !std::mem::replace(&mut self.has_printed, true) {
            let files = &self.location.files;
            let found = files.metadata(self.path, Default::default()).await?;
            if !found.is_directory {
                return Ok(Some(vec![itself(self.path, found)]));
            }
            let options = ReadDirectoryOptions {
                links: files.supports(Feature::ListLinks).await?,
                sandbox: None,
                ..ReadDirectoryOptions::default()
            };
            self.pages = Some(DirectoryPages::new(files.clone(), self.path, options));
        }
        let Some(pages) = &mut self.pages else {
            return Ok(None);
        };
        let Some(entries) = pages.next().await? else {
            return Ok(None);
        };
        let mut lines = Vec::with_capacity(entries.len());
        for entry in entries {
            let line = line(self.path, entry)?;
            if self.args.all || !line.name.as_bytes().starts_with(b".") {
                lines.push(line);
            }
        }
        lines.sort_by(|one, other| one.name.cmp(&other.name));
        if self.args.long {
            add_metadata(self.location, &mut lines).await?;
        }
        Ok(Some(lines))
    }
}

/// The listing of a file contains the file itself.
fn itself(path: &PathUri, found: MetadataResult) -> ListingLine {
    ListingLine {
        name: OsString::from(shown(path)),
        path: path.clone(),
        kind: kind(&found),
        target: found.symlink_target.clone().filter(|_| found.is_symlink),
        found: Some(found),
    }
}

fn line(directory: &PathUri, entry: DirectoryEntry) -> Result<ListingLine, ExecServerError> {
    let path = match entry.path {
        Some(path) => path,
        None => child(directory, &entry.file_name)?,
    };
    let exact = path.to_native().ok();
    let name = exact.and_then(|path| path.file_name().map(ToOwned::to_owned));
    let kind = match (&entry.symlink_target, entry.is_directory, entry.is_file) {
        (Some(_), ..) => "symlink",
        (None, true, _) => "directory",
        (None, false, true) => "file",
        (None, false, false) => "other",
    };
    Ok(ListingLine {
        name: name.unwrap_or_else(|| entry.file_name.into()),
        path,
        kind,
        target: entry.symlink_target,
        found: None,
    })
}

async fn add_metadata(location: &FilesLocation, lines: &mut [ListingLine]) -> anyhow::Result<()> {
    let mut tasks = JoinSet::new();
    let mut next = 0;
    while next < lines.len() || !tasks.is_empty() {
        if next < lines.len() && tasks.len() < PARALLEL {
            let (files, path) = (location.files.clone(), lines[next].path.clone());
            let number = next;
            tasks.spawn(async move { (number, files.metadata(&path, Default::default()).await) });
            next += 1;
            continue;
        }
        if let Some(joined) = tasks.join_next().await {
            let (number, found) = joined?;
            match found {
                Ok(found) => {
                    if found.is_symlink {
                        lines[number].kind = "symlink";
                        let link_target = &mut lines[number].target;
                        *link_target = link_target.take().or(found.symlink_target.clone());
                    }
                    lines[number].found = Some(found);
                }
                // A dangling link, or an entry that was removed meanwhile.
                Err(error) if error.is_not_found() => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}

fn kind(found: &MetadataResult) -> &'static str {
    match (found.is_symlink, found.is_directory, found.is_file) {
        (true, ..) => "symlink",
        (_, true, _) => "directory",
        (_, _, true) => "file",
        _ => "other",
    }
}

fn to_json(line: &ListingLine) -> Value {
    let mut value = json!({
        "name": line.name.to_string_lossy(),
        "path": line.path,
        "kind": line.kind,
    });
    if let Some(target) = &line.target {
        value["symlinkTarget"] = json!(target);
    }
    if let Some(found) = &line.found {
        value["metadata"] = json!(found);
    }
    value
}

fn long_listing(lines: &[ListingLine]) -> String {
    let rows = lines.iter().map(|line| {
        let letter = match line.kind {
            "directory" => 'd',
            "symlink" => 'l',
            "file" => '-',
            _ => '?',
        };
        let found = line.found.as_ref();
        let permissions = match found.and_then(|found| found.mode) {
            Some(mode) => permissions(mode),
            None => "?????????".to_owned(),
        };
        let mut name = line.name.to_string_lossy().into_owned();
        if let Some(target) = &line.target {
            let _ = write!(name, " -> {target}");
        }
        vec![
            format!("{letter}{permissions}"),
            found.map_or_else(|| "-".to_owned(), |found| bytes(found.size)),
            found.map_or_else(|| "-".to_owned(), |found| time(found.modified_at_ms)),
            name,
        ]
    });
    columns(rows, Some(1))
}

fn permissions(mode: u32) -> String {
    let mut text = String::with_capacity(9);
    for (shift, special, letter) in [(6, 0o4000, 's'), (3, 0o2000, 's'), (0, 0o1000, 't')] {
        let bits = mode >> shift;
        text.push(if bits & 4 != 0 { 'r' } else { '-' });
        text.push(if bits & 2 != 0 { 'w' } else { '-' });
        text.push(match (mode & special != 0, bits & 1 != 0) {
            (true, true) => letter,
            (true, false) => letter.to_ascii_uppercase(),
            (false, true) => 'x',
            (false, false) => '-',
        });
    }
    text
}

/// A time as in `2026-11-05 07:09:30`, in UTC.
fn time(millis: i64) -> String {
    date_and_time(millis.div_euclid(1000), ' ')
}

pub(super) async fn stat(location: &FilesLocation, args: &StatArgs) -> anyhow::Result<ExitCode> {
    let mut all = Vec::new();
    let mut text = String::new();
    for path in &args.paths {
        let uri = location.uri(path).await?;
        let found = location
            .files
            .metadata(&uri, Default::default())
            .await
            .with_context(|| format!("cannot read `{}`", path.display()))?;
        if args.json {
            let mut value = json!(found);
            value["path"] = json!(uri);
            all.push(value);
            continue;
        }
        let _ = writeln!(text, "    path  {}", visible(&shown(&uri)));
        let _ = writeln!(
            text,
            "    kind  {}",
            match (found.is_directory, found.is_file) {
                (true, _) => "directory",
                (_, true) => "file",
                _ => "other",
            }
        );
        if found.is_symlink {
            let target = found.symlink_target.as_deref().unwrap_or("?");
            let _ = writeln!(text, "    link  -> {}", visible(target));
        }
        let _ = writeln!(text, "    size  {} bytes", found.size);
        if let Some(mode) = found.mode {
            let _ = writeln!(text, "    mode  {:04o} ({})", mode, permissions(mode));
        }
        if let (Some(uid), Some(gid)) = (found.uid, found.gid) {
            let _ = writeln!(text, "   owner  {uid}:{gid}");
        }
        let _ = writeln!(text, "modified  {} UTC", time(found.modified_at_ms));
        if found.created_at_ms != 0 {
            let _ = writeln!(text, " created  {} UTC", time(found.created_at_ms));
        }
    }
    if args.json {
        text = serde_json::to_string_pretty(&all)?;
        text.push('\n');
    }
    print(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

pub(super) async fn walk(location: &FilesLocation, args: &WalkArgs) -> anyhow::Result<ExitCode> {
    let options = TreeWalkOptions {
        max_depth: args.depth,
        max_entries: args.entries.min(MAX_PAGE_ENTRIES),
        follow_directory_symlinks: args.follow,
        prune_hidden_directories: args.prune_hidden,
        ..TreeWalkOptions::default()
    };
    let path = location.uri(&args.path).await?;
    let (title, found) = (format!("listing {}", shown(&path)), FoundCount::default());
    let walk = async {
        match args.entries > MAX_PAGE_ENTRIES {
            true => walk_pages(location, &path, options, args.entries, &found).await,
            false => location.files.walk(&path, options).await,
        }
    };
    let walked = with_counter(&title, &found, walk).await;
    let walked = walked.with_context(|| format!("cannot walk `{}`", args.path.display()))?;
    let failed = !walked.errors.is_empty();
    if args.json {
        print(format!("{}\n", serde_json::to_string_pretty(&walked)?).as_bytes())?;
    } else {
        let for_terminal = prints_to_terminal();
        let mut out = Vec::new();
        for entry in &walked.entries {
            push_line(&mut out, &native_bytes(&entry.path), for_terminal);
        }
        print(&out)?;
        for error in &walked.errors {
            notice(&visible(&format!(
                "cannot read `{}`: {}",
                shown(&error.path),
                error.message
            )));
        }
        if walked.truncated {
            notice("not all entries are listed: raise --entries or --depth, or start deeper");
        }
    }
    Ok(if failed {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

/// Walks page by page until the requested number of entries is reached.
async fn walk_pages(
    location: &FilesLocation,
    path: &PathUri,
    options: TreeWalkOptions,
    entries: usize,
    found: &FoundCount,
) -> Result<WalkResult, ExecServerError> {
    let mut pages = WalkPages::new(location.files.clone(), path, options);
    let mut all = WalkResult {
        entries: Vec::new(),
        errors: Vec::new(),
        truncated: false,
        next: None,
    };
    while let Some(page) = pages.next().await? {
        all.entries.extend(page.entries);
        found.store(all.entries.len() as u64, Ordering::Relaxed);
        all.errors.extend(page.errors);
        all.truncated |= page.truncated;
        if all.entries.len() > entries {
            all.entries.truncate(entries);
            all.truncated = true;
            break;
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listing_formats_times_and_permissions() {
        for (millis, text) in [
            (0, "1970-01-01 00:00:00"),
            (951_782_400_000, "2000-02-29 00:00:00"),
            (1_791_000_000_123, "2026-10-03 04:00:00"),
            (-1, "1969-12-31 23:59:59"),
            (-86_400_000 * 365, "1969-01-01 00:00:00"),
        ] {
            assert_eq!(time(millis), text, "{millis}");
        }
        for (mode, text) in [
            (0o644, "rw-r--r--"),
            (0o4755, "rwsr-xr-x"),
            (0o1777, "rwxrwxrwt"),
            (0o2000, "-----S---"),
        ] {
            assert_eq!(permissions(mode), text, "{mode:o}");
        }
    }
}
