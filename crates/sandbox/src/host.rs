//! Host capabilities for sandboxes: namespaces, mounts, Landlock, seccomp.
//!
//! Determined once, by trying each kernel feature in a separate process.

use std::fs;

use serde::{Deserialize, Serialize};

/// Sandbox features of this machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostFeatures {
    /// Kernel release.
    pub kernel: String,
    /// Whether a user namespace with a mount namespace can be created, or why not.
    pub user_namespaces: Result<(), String>,
    /// Whether a mount namespace can be created with the server's privileges, or why not.
    pub privileged_mounts: Result<(), String>,
    /// Whether attributes of a whole mount tree can be changed in one call, or why not.
    pub mount_api: Result<(), String>,
    /// Whether a network namespace can be created, or why not.
    pub network_namespaces: Result<(), String>,
    /// Whether a network namespace with a working loopback interface can be created, or why not.
    pub private_networks: Result<(), String>,
    /// Whether a new `/proc` can be mounted.
    pub proc_mountable: bool,
    /// Landlock ABI version; 0 without Landlock.
    pub landlock: u32,
    /// Whether system calls can be filtered.
    pub seccomp: bool,
}

impl HostFeatures {
    /// Returns whether a mount view needs a user namespace (true) or can be built with the server's
    /// privileges (false).
    ///
    /// # Errors
    ///
    /// The reason why neither works.
    pub fn mounts(&self) -> Result<bool, String> {
        self.mount_api.clone()?;
        let user = match (&self.user_namespaces, &self.privileged_mounts) {
            (Ok(()), _) => true,
            (Err(_), Ok(())) => false,
            (Err(why), Err(_)) => return Err(format!("user namespaces are not permitted: {why}")),
        };
        self.network_namespaces
            .clone()
            .map_err(|why| format!("network namespaces are not permitted: {why}"))?;
        Ok(user)
    }

    /// Checks that a process can run in a private network that it cannot leave.
    ///
    /// # Errors
    ///
    /// The reason why it cannot.
    pub fn private_network(&self) -> Result<(), String> {
        self.mounts()?;
        self.private_networks
            .clone()
            .map_err(|why| format!("a private network cannot be set up: {why}"))?;
        if !self.seccomp {
            return Err("this kernel has no seccomp filters".to_owned());
        }
        Ok(())
    }

    /// Returns a host without any sandbox feature, for this reason.
    pub fn nothing(why: &str) -> Self {
        let no = || Err(why.to_owned());
        Self {
            kernel: kernel_release(),
            user_namespaces: no(),
            privileged_mounts: no(),
            mount_api: no(),
            network_namespaces: no(),
            private_networks: no(),
            proc_mountable: false,
            landlock: 0,
            seccomp: false,
        }
    }
}

/// Returns the kernel release.
pub fn kernel_release() -> String {
    let text = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    text.trim().to_owned()
}

/// Returns system settings that prevent unprivileged user namespaces, each with the fix.
pub fn namespace_obstacles() -> Vec<(&'static str, &'static str)> {
    let setting = |path: &str| {
        let text = fs::read_to_string(path).ok()?;
        text.trim().parse::<u64>().ok()
    };
    let mut found = Vec::new();
    if setting("/proc/sys/user/max_user_namespaces") == Some(0) {
        found.push((
            "user.max_user_namespaces is 0",
            "sysctl -w user.max_user_namespaces=15000",
        ));
    }
    if setting("/proc/sys/kernel/unprivileged_userns_clone") == Some(0) {
        found.push((
            "kernel.unprivileged_userns_clone is 0",
            "sysctl -w kernel.unprivileged_userns_clone=1",
        ));
    }
    if setting("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == Some(1) {
        found.push((
            "AppArmor restricts user namespaces (kernel.apparmor_restrict_unprivileged_userns is 1)",
            "give exec-server an AppArmor profile with `userns,`, or \
             sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ));
    }
    if found.is_empty() && in_container() {
        found.push((
            "this is a container, whose runtime may forbid them",
            "run it with a seccomp profile that allows unshare, clone and mount \
             (docker: --security-opt seccomp=unconfined --security-opt apparmor=unconfined)",
        ));
    }
    found
}

/// Returns whether this process probably runs in a container.
pub fn in_container() -> bool {
    let marks = ["/.dockerenv", "/run/.containerenv"];
    let environ = fs::read("/proc/1/environ").unwrap_or_default();
    marks.iter().any(|mark| fs::exists(mark).unwrap_or(false))
        || environ
            .split(|&byte| byte == 0)
            .any(|variable| variable.starts_with(b"container="))
}
