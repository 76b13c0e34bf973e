//! `fs/*` on paths.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use exec_server_executor::fs::{self, Attributes, FsError, Kind, Links, Listing, Walked};
use exec_server_executor::sandbox::files::{Files, Intent, Soon, depends_on_directory};
use exec_server_protocol::PathUri;
use exec_server_protocol::chunk::{encode_into, encoded_len};
use exec_server_protocol::fs::{
    CanonicalizeParams, CanonicalizeResult, CopyParams, CreateDirectoryParams, CreateSymlinkParams,
    GetMetadataParams, HashParams, HashResult, Metadata, ReadDirectoryParams, ReadFileParams,
    RemoveParams, RenameParams, SetMetadataParams, WalkKind, WalkParams, WriteFileParams,
};
use exec_server_protocol::limits::MAX_MESSAGE_BYTES;
use exec_server_protocol::method::Empty;
use exec_server_protocol::sandbox::Sandbox;
use exec_server_protocol::text::hex;

use crate::ApiError;
use crate::connection::{Connection, Responder};
use crate::dispatch::Call;
use crate::files::{attempt, encode_pieces};

/// Room for everything in an answer but the data.
const ENVELOPE_BYTES: usize = 4096;

/// Files up to this size are read where the request is, if nothing has to be waited for: beyond it,
/// going to another thread costs less than holding up what comes next.
const AT_ONCE_BYTES: usize = 32 * 1024;

/// About how large the answer to a listing may get.
const LISTING_BYTES: usize = 8 << 20;

/// Checks what every method checks: the path and the sandbox.
pub(super) fn admit(
    call: &Call<'_>,
    path: &PathUri,
    sandbox: &mut Option<Sandbox>,
    intent: Intent,
) -> Result<(PathBuf, Files), ApiError> {
    let files = confined(call, sandbox.take(), intent)?;
    Ok((native(path)?, files))
}

/// Where work under a policy is done, if the policy says enough.
pub(super) fn confined(
    call: &Call<'_>,
    sandbox: Option<Sandbox>,
    intent: Intent,
) -> Result<Files, ApiError> {
    let executor = call.connection.server.executor();
    let has_directory = sandbox.as_ref().is_none_or(|sandbox| {
        let context = sandbox.policy_context.as_ref();
        context.is_some_and(|context| context.cwd.is_some()) || sandbox.cwd.is_some()
    });
    let is_dynamic = sandbox.as_ref().is_some_and(depends_on_directory);
    let files = executor.files(sandbox, intent);
    if !files.is_direct() && is_dynamic && !has_directory {
        return Err(ApiError::invalid_params(
            "file system sandbox context with dynamic permissions requires cwd",
        ));
    }
    Ok(files)
}

fn native(path: &PathUri) -> Result<PathBuf, ApiError> {
    path.to_native()
        .map_err(|error| ApiError::invalid_request(error.to_string()))
}

fn links(follow: bool) -> Links {
    if follow { Links::Follow } else { Links::Refuse }
}

/// Does file work on a thread of its own kind and answers from there.
pub(super) fn run<R: serde::Serialize>(
    call: Call<'_>,
    work: impl FnOnce() -> Result<R, ApiError> + Send + 'static,
) {
    let responder = call.responder;
    call.connection
        .file_work(move || responder.send(attempt(work)));
}

/// As [`run`], for work that takes its time; it is asked between its steps whether to go on.
pub(super) fn run_long<R: serde::Serialize>(
    call: Call<'_>,
    work: impl FnOnce(fs::Cancelled<'_>) -> Result<R, FsError> + Send + 'static,
) {
    let (closed, responder) = (call.connection.closed.clone(), call.responder);
    call.connection.long_file_work(move || {
        responder.send(attempt(|| Ok(work(&|| closed.is_cancelled())?)));
    });
}

/// Makes a long answer of what file work finds, when there is room for it.
fn run_listing<T>(
    call: Call<'_>,
    work: impl FnOnce(fs::Cancelled<'_>) -> Result<T, FsError> + Send + 'static,
    answer: impl FnOnce(Responder, T) + Send + 'static,
) {
    let (connection, responder) = (Arc::clone(call.connection), call.responder);
    call.connection.file_work(move || {
        let closed = connection.closed.clone();
        connection.with_room(responder, LISTING_BYTES, move |responder| {
            match attempt(|| Ok(work(&|| closed.is_cancelled())?)) {
                Ok(found) => answer(responder, found),
                Err(error) => responder.send_error(error),
            }
        });
    });
}

pub(super) async fn blocking<R: Send + 'static>(
    work: impl FnOnce() -> Result<R, ApiError> + Send + 'static,
) -> Result<R, ApiError> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(ApiError::internal(format!("file work failed: {error}"))))
}

pub(crate) fn read_file(call: Call<'_>, mut params: ReadFileParams) {
    let (path, files) = match admit(&call, &params.path, &mut params.sandbox, Intent::Read) {
        Ok(admitted) => admitted,
        Err(error) => return call.responder.send_error(error),
    };
    let links = links(params.follow_symlinks);
    if files.is_direct()
        && let Some(data) = fs::read_at_once(&path, links, AT_ONCE_BYTES)
    {
        return send_content(call.responder, &data);
    }
    let (connection, responder) = (Arc::clone(call.connection), call.responder);
    let Some(soon) = files.read_soon(&path, links, AT_ONCE_BYTES as u32) else {
        return read_apart(&connection, responder, files, path, links, None);
    };
    let there = Arc::clone(&connection);
    there.spawn(async move {
        match soon.finish(connection.is_alone()).await {
            Some(Ok(Soon::Content(data))) => send_content(responder, &data),
            Some(Ok(Soon::File(file))) => {
                read_apart(&connection, responder, files, path, links, Some(file));
            }
            Some(Err(error)) => responder.send_error(error.into()),
            None => read_apart(&connection, responder, files, path, links, None),
        }
    });
}

/// Answers with what is in a file.
fn send_content(responder: Responder, data: &[u8]) {
    responder.send_result(encoded_len(data.len()) + ENVELOPE_BYTES, |out| {
        out.extend_from_slice(b"{\"dataBase64\":\"");
        encode_into(data, out);
        out.extend_from_slice(b"\"}");
    });
}

/// Reads a file, which may be open already, and answers with what is in it.
fn read_apart(
    connection: &Arc<Connection>,
    responder: Responder,
    files: Files,
    path: PathBuf,
    links: Links,
    file: Option<std::fs::File>,
) {
    let there = Arc::clone(connection);
    connection.file_work(move || {
        let connection = there;
        let opened = attempt(|| {
            let file = match file {
                Some(file) => file,
                None => files.open_file(&path, links)?,
            };
            if files.is_direct() {
                fs::learn(&path);
            }
            let size = fs::readable_size(&file, &path)?;
            fits(usize::try_from(size).unwrap_or(usize::MAX / 2))?;
            Ok((file, size))
        });
        let (file, size) = match opened {
            Ok(opened) => opened,
            Err(error) => return responder.send_error(error),
        };
        let answer_bytes = encoded_len(size as usize) + ENVELOPE_BYTES;
        // The bytes are read only when there is room for the answer they make.
        connection.with_room(responder, answer_bytes, move |responder| {
            responder.try_send_result(answer_bytes, |out| {
                out.extend_from_slice(b"{\"dataBase64\":\"");
                // It may grow meanwhile, but not without end.
                let most = MAX_MESSAGE_BYTES / 4 * 3;
                let read = attempt(|| {
                    encode_pieces(out, most, |done, piece| {
                        Ok(
                            fs::read_at(&file, done, piece).map_err(|source| FsError::Io {
                                path: path.clone(),
                                source,
                            })?,
                        )
                    })
                })?;
                fits(read)?;
                out.extend_from_slice(b"\"}");
                Ok(())
            });
        });
    });
}

/// Whether a file of this size can be answered with.
fn fits(size: usize) -> Result<(), ApiError> {
    let answer = encoded_len(size) + ENVELOPE_BYTES;
    if answer <= MAX_MESSAGE_BYTES {
        return Ok(());
    }
    Err(ApiError::invalid_request(format!(
        "answer of {answer} bytes exceeds the limit of {MAX_MESSAGE_BYTES} bytes per message; \
         stream the file with fs/open and fs/readBlock"
    )))
}

/// The mode that was asked for, if it can be one.
fn attributes(mode: Option<u32>, modified_at_ms: Option<i64>) -> Result<Attributes, ApiError> {
    if let Some(mode) = mode
        && mode > 0o7777
    {
        let message = format!("mode {mode:#o} exceeds the limit of 0o7777");
        return Err(ApiError::invalid_params(message));
    }
    Ok(Attributes {
        mode,
        modified_at_ms,
    })
}

pub(crate) fn write_file(mut call: Call<'_>, mut params: WriteFileParams) {
    let admitted =
        admit(&call, &params.path, &mut params.sandbox, Intent::Write).and_then(|(path, files)| {
            Ok((path, files, attributes(params.mode, params.modified_at_ms)?))
        });
    call.responder.hold(params.data_base64.as_slice().len());
    match admitted {
        Ok((path, files, attributes)) => run(call, move || {
            let links = links(params.follow_symlinks);
            files.write_file(&path, params.data_base64.as_slice(), links, attributes)?;
            Ok(Empty {})
        }),
        Err(error) => call.responder.send_error(error),
    }
}

pub(crate) fn get_metadata(call: Call<'_>, mut params: GetMetadataParams) {
    let (path, files) = match admit(&call, &params.path, &mut params.sandbox, Intent::Read) {
        Ok(admitted) => admitted,
        Err(error) => return call.responder.send_error(error),
    };
    let links = links(params.follow_symlinks);
    if files.is_direct()
        && let Some(found) = fs::metadata_at_once(&path, links)
    {
        return call.responder.send(told(found));
    }
    run(call, move || {
        let found = files.metadata(&path, links);
        if files.is_direct() {
            fs::learn(&path);
        }
        told(found)
    });
}

/// Metadata, as the wire has it.
fn told(found: Result<fs::Metadata, FsError>) -> Result<Metadata, ApiError> {
    Ok(found.map_err(ApiError::of_entry)?.into())
}

pub(crate) fn create_directory(call: Call<'_>, mut params: CreateDirectoryParams) {
    match admit(&call, &params.path, &mut params.sandbox, Intent::Write) {
        Ok((path, files)) => run(call, move || {
            files.create_directory(&path, params.recursive, links(params.follow_symlinks))?;
            Ok(Empty {})
        }),
        Err(error) => call.responder.send_error(error),
    }
}

pub(crate) fn canonicalize(call: Call<'_>, mut params: CanonicalizeParams) {
    match admit(&call, &params.path, &mut params.sandbox, Intent::Read) {
        Ok((path, files)) => run(call, move || {
            let path = uri(&files.canonicalize(&path)?)?;
            Ok(CanonicalizeResult { path })
        }),
        Err(error) => call.responder.send_error(error),
    }
}

/// The URI of a path that the system gave us.
fn uri(path: &Path) -> Result<PathUri, ApiError> {
    PathUri::from_native(path).map_err(|error| ApiError::internal(error.to_string()))
}

pub(crate) fn read_directory(call: Call<'_>, mut params: ReadDirectoryParams) {
    match admit(&call, &params.path, &mut params.sandbox, Intent::Read) {
        Ok((path, files)) => run_listing(
            call,
            move |cancelled| files.read_directory(&path, params.links, cancelled),
            move |responder, (listing, targets)| {
                send_listing(responder, &params.path, &listing, &targets);
            },
        ),
        Err(error) => call.responder.send_error(error),
    }
}

fn send_listing(
    responder: Responder,
    directory: &PathUri,
    listing: &Listing,
    targets: &HashMap<usize, PathBuf>,
) {
    responder.send_result(listing.len() * 64, |out| {
        out.extend_from_slice(b"{\"entries\":[");
        let mut uri = String::new();
        for (position, (name, kind)) in listing.iter().enumerate() {
            if position > 0 {
                out.push(b',');
            }
            out.extend_from_slice(b"{\"fileName\":");
            push_text(out, &name.to_string_lossy());
            out.extend_from_slice(match kind {
                Kind::Directory => b",\"isDirectory\":true,\"isFile\":false",
                Kind::File => b",\"isDirectory\":false,\"isFile\":true",
                Kind::Symlink | Kind::Other => &b",\"isDirectory\":false,\"isFile\":false"[..],
            });
            if name.to_str().is_none() {
                uri.clear();
                directory.push_child(name, &mut uri);
                out.extend_from_slice(b",\"path\":\"");
                out.extend_from_slice(uri.as_bytes());
                out.push(b'"');
            }
            if let Some(target) = targets.get(&position) {
                out.extend_from_slice(b",\"symlinkTarget\":");
                push_text(out, &target.to_string_lossy());
            }
            out.push(b'}');
        }
        out.extend_from_slice(b"]}");
    });
}

/// Appends a JSON string.
fn push_text(out: &mut Vec<u8>, text: &str) {
    let written = serde_json::to_writer(out, text);
    debug_assert!(written.is_ok(), "any text can be written to memory");
}

pub(crate) fn walk(call: Call<'_>, mut params: WalkParams) {
    match admit(&call, &params.path, &mut params.sandbox, Intent::Read) {
        Ok((path, files)) => run_listing(
            call,
            move |cancelled| files.walk(&path, params.options, cancelled),
            |responder, walked| send_walk(responder, &walked),
        ),
        Err(error) => call.responder.send_error(error),
    }
}

fn send_walk(responder: Responder, walked: &Walked) {
    responder.send_result(64 * 1024, |out| {
        out.extend_from_slice(b"{\"entries\":[");
        let mut text = String::new();
        let mut first = true;
        for (directory, entries) in walked.directories() {
            // Absolute and without NUL, as every path that was walked to.
            let Ok(directory) = PathUri::from_native(directory) else {
                continue;
            };
            for (name, kind) in entries {
                text.clear();
                directory.push_child(name, &mut text);
                out.extend_from_slice(if first {
                    b"{\"path\":\""
                } else {
                    b",{\"path\":\""
                });
                first = false;
                out.extend_from_slice(text.as_bytes());
                out.extend_from_slice(match kind {
                    WalkKind::Directory => b"\",\"kind\":\"directory\"}",
                    WalkKind::File => &b"\",\"kind\":\"file\"}"[..],
                });
            }
        }
        out.extend_from_slice(b"],\"errors\":[");
        let errors = walked.errors.iter().filter_map(|(path, error)| {
            let path = PathUri::from_native(path).ok()?;
            Some((path, error.to_string()))
        });
        for (position, (path, message)) in errors.enumerate() {
            out.extend_from_slice(if position == 0 {
                b"{\"path\":\""
            } else {
                b",{\"path\":\""
            });
            out.extend_from_slice(path.as_str().as_bytes());
            out.extend_from_slice(b"\",\"message\":");
            push_text(out, &message);
            out.push(b'}');
        }
        out.extend_from_slice(b"],\"truncated\":");
        out.extend_from_slice(if walked.truncated {
            b"true}"
        } else {
            b"false}"
        });
    });
}

pub(crate) fn remove(call: Call<'_>, mut params: RemoveParams) {
    let (path, files) = match admit(&call, &params.path, &mut params.sandbox, Intent::Write) {
        Ok(admitted) => admitted,
        Err(error) => return call.responder.send_error(error),
    };
    let links = links(params.follow_symlinks);
    let responder = call.responder;
    let work = move || {
        responder.send(attempt(|| {
            files
                .remove(&path, params.recursive, params.force, links)
                .map_err(ApiError::of_entry)?;
            Ok(Empty {})
        }));
    };
    if params.recursive {
        call.connection.long_file_work(work);
    } else {
        call.connection.file_work(work);
    }
}

pub(crate) fn copy(call: Call<'_>, mut params: CopyParams) {
    let paths = admit(
        &call,
        &params.source_path,
        &mut params.sandbox,
        Intent::Write,
    )
    .and_then(|(source, files)| Ok((source, native(&params.destination_path)?, files)));
    match paths {
        Ok((source, destination, files)) => run_long(call, move |cancelled| {
            files.copy(&source, &destination, params.recursive, cancelled)?;
            Ok(Empty {})
        }),
        Err(error) => call.responder.send_error(error),
    }
}

pub(crate) fn rename(call: Call<'_>, mut params: RenameParams) {
    let paths = admit(&call, &params.from, &mut params.sandbox, Intent::Write)
        .and_then(|(from, files)| Ok((from, native(&params.to)?, files)));
    match paths {
        Ok((from, to, files)) => run_long(call, move |cancelled| {
            files.rename(&from, &to, params.overwrite, cancelled)?;
            Ok(Empty {})
        }),
        Err(error) => call.responder.send_error(error),
    }
}

pub(crate) fn set_metadata(call: Call<'_>, mut params: SetMetadataParams) {
    let admitted =
        admit(&call, &params.path, &mut params.sandbox, Intent::Write).and_then(|(path, files)| {
            Ok((path, files, attributes(params.mode, params.modified_at_ms)?))
        });
    match admitted {
        Ok((path, files, attributes)) => run(call, move || {
            files.set_metadata(&path, attributes, links(params.follow_symlinks))?;
            Ok(Empty {})
        }),
        Err(error) => call.responder.send_error(error),
    }
}

pub(crate) fn create_symlink(call: Call<'_>, mut params: CreateSymlinkParams) {
    match admit(&call, &params.path, &mut params.sandbox, Intent::Write) {
        Ok((path, files)) => run(call, move || {
            files.create_symlink(&path, Path::new(&params.target))?;
            Ok(Empty {})
        }),
        Err(error) => call.responder.send_error(error),
    }
}

pub(crate) fn hash(call: Call<'_>, mut params: HashParams) {
    match admit(&call, &params.path, &mut params.sandbox, Intent::Read) {
        Ok((path, files)) => run_long(call, move |cancelled| {
            let (digest, length) = files.hash(&path, params.length, cancelled)?;
            let sha256 = hex(digest);
            Ok(HashResult { sha256, length })
        }),
        Err(error) => call.responder.send_error(error),
    }
}
