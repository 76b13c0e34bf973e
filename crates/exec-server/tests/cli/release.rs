//! Files of a release: the container image that `scripts/oci-image` writes.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use sha2::{Digest as _, Sha256};

/// Writes an image for both kinds of processors and unpacks it; returns the archive and the directory.
fn image(directory: &Path, name: &str) -> (Vec<u8>, PathBuf) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/oci-image");
    let archive = directory.join(format!("{name}.tar"));
    let binary = |architecture: &str| {
        let path = directory.join(architecture);
        std::fs::write(&path, format!("binary for {architecture}")).unwrap();
        format!("{architecture}={}", path.display())
    };
    let authorities = directory.join("authorities");
    std::fs::write(&authorities, "certificates").unwrap();
    let written = Command::new(script)
        .arg(&archive)
        .args([binary("amd64"), binary("arm64")])
        .args(["--version", "1.2.3", "--ca"])
        .arg(authorities)
        .output()
        .unwrap();
    assert!(written.status.success(), "{written:?}");
    let unpacked = directory.join(name);
    std::fs::create_dir(&unpacked).unwrap();
    let mut tar = Command::new("tar");
    tar.arg("-xf").arg(&archive).arg("-C").arg(&unpacked);
    assert!(tar.status().unwrap().success());
    (std::fs::read(archive).unwrap(), unpacked)
}

/// The content that a descriptor names, checked against its size and digest.
fn blob(image: &Path, descriptor: &Value) -> Vec<u8> {
    let digest = descriptor["digest"].as_str().unwrap();
    let hex = digest.strip_prefix("sha256:").unwrap();
    let content = std::fs::read(image.join("blobs/sha256").join(hex)).unwrap();
    let found: String = Sha256::digest(&content)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    assert_eq!(
        (found.as_str(), content.len() as u64),
        (hex, descriptor["size"].as_u64().unwrap())
    );
    content
}

#[test]
fn container_image_has_matching_digests_and_is_reproducible() {
    let directory = tempfile::tempdir().unwrap();
    let (first, image_directory) = image(directory.path(), "first");
    let (second, _) = image(directory.path(), "second");
    assert!(first == second, "two images of the same files differ");
    let read = |bytes: Vec<u8>| serde_json::from_slice::<Value>(&bytes).unwrap();
    let top = read(std::fs::read(image_directory.join("index.json")).unwrap());
    let index = read(blob(&image_directory, &top["manifests"][0]));
    let manifests = index["manifests"].as_array().unwrap();
    let mut architectures = Vec::new();
    for manifest in manifests {
        let architecture = manifest["platform"]["architecture"].as_str().unwrap();
        architectures.push(architecture);
        let manifest = read(blob(&image_directory, manifest));
        let config = read(blob(&image_directory, &manifest["config"]));
        assert_eq!(config["architecture"], architecture);
        let compressed = directory
            .path()
            .join(format!("layer-{architecture}.tar.gz"));
        std::fs::write(&compressed, blob(&image_directory, &manifest["layers"][0])).unwrap();
        let listed = Command::new("tar")
            .arg("-tzf")
            .arg(&compressed)
            .output()
            .unwrap();
        let listed = String::from_utf8(listed.stdout).unwrap();
        for name in [
            "usr/bin/exec-server",
            "usr/bin/codex",
            "tmp/",
            "etc/ssl/certs/ca-certificates.crt",
        ] {
            assert!(listed.lines().any(|line| line == name), "{name}: {listed}");
        }
    }
    assert_eq!(architectures, ["amd64", "arm64"]);
}
